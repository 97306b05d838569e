"""The watch over the progress boards of all workers, for ranks that hang or stay behind.

A pure state machine.

-> coordinator/detectors/hang.py and join_timeout.py judge the ranks;
coordinator/handlers/on_suspicion.py acts on the findings. process/progress_board.py: a board.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.hang import HangDetector, HungRank
from chaoskit.coordinator.detectors.join_timeout import FOLLOW_S, JoinTimeout
from chaoskit.coordinator.detectors.phase_limits import PhaseLimits
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Plan

#: After a longer silence of a worker, its next beat does not show the duration of its steps.
_SILENCE_S = 1.0
#: A beat that arrives this soon after a generation was formed may have been sent before.
_BELATED_S = 0.3
#: Phases in which a rank waits for data of others, or for its connections to them.
_MUTUAL = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.RESTORE})


class RankWatch:
    """The last beat of each live worker, and the judgement of the ranks by them."""

    def __init__(self, config: RunConfig) -> None:
        self._hang_detector = HangDetector(config)
        self._join_timeout = JoinTimeout()
        self._beats: dict[str, Beat] = {}
        self._heard_s: dict[str, float] = {}
        self._worked_generation, self._worked_s = 0, 0.0
        self._plan_generation = 0
        self._planned_s: float | None = (
            None  # when the newest plan came; None once it has led to a step
        )

    @property
    def step_s(self) -> float:
        """The recent step time in seconds; 0 while it is not known."""
        return self._hang_detector.step_s

    @property
    def limits(self) -> PhaseLimits:
        """The limits of the phases."""
        return self._hang_detector.limits

    def moved_limits(self) -> dict[str, Any] | None:
        """Return the fields of a record ``hang_limits``; None if no limit moved since the last."""
        return self.limits.news(self.step_s)

    @property
    def committed(self) -> int:
        """The highest number of steps in the last beats of live workers; 0 without a beat."""
        return max((beat.step for beat in self._beats.values()), default=0)

    def hear(self, beats: Iterable[Beat], now_s: float) -> None:
        """Take in beats of live workers."""
        for beat in beats:
            if now_s - self._heard_s.get(beat.worker, now_s) > _SILENCE_S:
                self._hang_detector.interrupt(beat.worker)
            self._beats[beat.worker], self._heard_s[beat.worker] = beat, now_s

    def forget(self, worker: str) -> None:
        """Forget a worker that is lost."""
        self._beats.pop(worker, None)
        self._heard_s.pop(worker, None)

    def regroups(self, worker: str) -> bool:
        """Return whether a worker waits for a new process group; False if it sent no beat."""
        beat = self._beats.get(worker)
        return beat is not None and beat.phase == Phase.REGROUP

    def waiting_s(self, members: Sequence[str]) -> float:
        """Return the seconds for which all ``members`` have waited for each other.

        Return 0 if one of them does not wait, or has sent no beat.
        """
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        if len(beats) < len(members) or not all(beat.phase in _MUTUAL for beat in beats):
            return 0.0
        return min((beat.age_ms / 1000 for beat in beats), default=0.0)

    def look(
        self,
        plan: Plan,
        members: Sequence[str],
        arrived: Collection[str],
        now_s: float,
        *,
        worked: int = 0,
        is_over: bool = False,
        joiner_waits: bool = False,
        replacement_starts: bool = False,
    ) -> tuple[list[HungRank], bool]:
        """Return the ``members`` that hang, and True if all wait for each other instead.

        The duration of a recovery is measured here, too.

        Args:
            plan: the plan of the last generation.
            arrived: members that have come to its rendezvous.
            worked: the last generation of which all members have built the group. If the plan does
                not abort, that generation continues until a step boundary, and the waits before it
                do not count.
            is_over: the plan is given up, and there is no newer one yet: no member need follow it.
            joiner_waits: a spare is ready to join, and waits even for the only rank of a world of
                one.
            replacement_starts: no spare is ready, and one is being started.
        """
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        self._measure_recovery(plan, beats, now_s)
        late_members = (
            []
            if is_over
            else self._join_timeout.observe(plan, beats, set(arrived), now_s, worked=worked)
        )
        hangs = {hang.worker: hang for hang in late_members}
        hanging = self._hang_detector.observe(
            beats,
            now_s,
            planned=plan.generation,
            joiner_waits=joiner_waits,
            replacement_starts=replacement_starts,
            gathers=self._planned_s is not None and now_s < self._planned_s + FOLLOW_S,
            incomplete=len(beats) < len(members),
            world_of_one=len(plan.members) == 1 and not is_over,
        )
        # A rank that has no copy to restore from waits in this phase for the next plan.
        hangs |= {
            hang.worker: hang for hang in hanging if not (is_over and hang.phase == Phase.RESTORE)
        }
        if worked != self._worked_generation:
            self._worked_generation, self._worked_s = worked, now_s
        if plan.abort:
            have_gathered = all(beat.generation == plan.generation for beat in beats)
        else:
            have_gathered = all(
                self._heard_s[beat.worker] > self._worked_s + _BELATED_S for beat in beats
            )
        formed_s = self._worked_s if worked == plan.generation else -math.inf
        is_candidate = not hangs and have_gathered and len(beats) == len(members)
        return list(hangs.values()), is_candidate and self._hang_detector.stalled(
            now_s, formed_s=formed_s
        )

    def _measure_recovery(self, plan: Plan, beats: Sequence[Beat], now_s: float) -> None:
        """Measure a recovery, from a plan that interrupts a step to the first commit under it."""
        if plan.generation != self._plan_generation:
            self._plan_generation, self._planned_s = plan.generation, now_s if plan.abort else None
        if self._planned_s is not None and any(
            beat.trained_in == plan.generation for beat in beats
        ):
            self._hang_detector.limits.note_recovery(now_s - self._planned_s)
            self._planned_s = None
