"""What the progress boards of all workers say together: who hangs, and who does not follow. A pure state machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.hang import Hang, HangDetector
from chaoskit.coordinator.detectors.muster import FOLLOW_S, Muster
from chaoskit.coordinator.detectors.phase_limits import PhaseLimits
from chaoskit.vocabulary import Phase
from chaoskit.wire.messages import Beat, Plan

#: Whoever was not heard for longer tells nothing of how long the steps took meanwhile.
_SILENCE_S = 1.0
#: What is heard so soon after a generation was formed may have been said before.
_BELATED_S = 0.3
#: Phases in which a rank waits for data of others, or for its connections to them.
_MUTUAL = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.RESTORE})


class Watch:
    """Keeps the last beat of each live worker."""

    def __init__(self, config: RunConfig) -> None:
        self._hangs = HangDetector(config)
        self._muster = Muster()
        self._beats: dict[str, Beat] = {}
        self._heard_s: dict[str, float] = {}
        self._worked, self._worked_s = 0, 0.0
        self._plan_generation = 0
        self._planned_s: float | None = (
            None  # when the newest plan came; None once it has led to a step
        )

    @property
    def step_s(self) -> float:
        """The recent step time; 0 while it is not known."""
        return self._hangs.step_s

    @property
    def limits(self) -> PhaseLimits:
        """How long phases may last."""
        return self._hangs.limits

    def moved_limits(self) -> dict[str, Any] | None:
        """Return the fields of a record ``hang_limits``, if a limit has moved notably since they were last returned."""
        return self.limits.news(self.step_s)

    @property
    def committed(self) -> int:
        """Steps that some rank has committed."""
        return max((beat.step for beat in self._beats.values()), default=0)

    def hear(self, beats: Iterable[Beat], now_s: float) -> None:
        """Beats of live workers."""
        for beat in beats:
            if now_s - self._heard_s.get(beat.worker, now_s) > _SILENCE_S:
                self._hangs.interrupt(beat.worker)
            self._beats[beat.worker], self._heard_s[beat.worker] = beat, now_s

    def forget(self, worker: str) -> None:
        """It is lost."""
        self._beats.pop(worker, None)
        self._heard_s.pop(worker, None)

    def regroups(self, worker: str) -> bool:
        """Whether it is waiting for a new process group."""
        beat = self._beats.get(worker)
        return beat is not None and beat.phase == Phase.REGROUP

    def waiting_s(self, members: Sequence[str]) -> float:
        """For how long all ``members`` have been waiting for each other; 0 if one of them is not."""
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
        over: bool = False,
        grows: bool = False,
        starts: bool = False,
    ) -> tuple[list[Hang], bool]:
        """Return the ``members`` that hang, and whether all wait for each other instead.

        Args:
            plan: of the last generation.
            arrived: members that have come to its rendezvous.
            worked: the last generation of which all have built the group. Where the plan does not abort, it goes on
                until a step boundary, and how long a rank had waited before it is of no interest.
            grows: a spare is ready to join, and so waits even for the only rank of a world of one.
            starts: no spare is ready, and one is being started.
            over: the plan is given up, and there is no newer one yet: nobody need follow it.
        """
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        self._measure_recovery(plan, beats, now_s)
        late = [] if over else self._muster.observe(plan, beats, set(arrived), now_s, worked=worked)
        hangs = {hang.worker: hang for hang in late}
        hanging = self._hangs.observe(
            beats,
            now_s,
            planned=plan.generation,
            joiner_waits=grows,
            replacement_starts=starts,
            gathers=self._planned_s is not None and now_s < self._planned_s + FOLLOW_S,
            incomplete=len(beats) < len(members),
            world_of_one=len(plan.members) == 1 and not over,
        )
        # Whoever has no copy to restore from waits there for the next plan.
        hangs |= {
            hang.worker: hang for hang in hanging if not (over and hang.phase == Phase.RESTORE)
        }
        if worked != self._worked:
            self._worked, self._worked_s = worked, now_s
        if plan.abort:
            gathered = all(beat.generation == plan.generation for beat in beats)
        else:
            gathered = all(
                self._heard_s[beat.worker] > self._worked_s + _BELATED_S for beat in beats
            )
        formed_s = self._worked_s if worked == plan.generation else -math.inf
        is_candidate = not hangs and gathered and len(beats) == len(members)
        return list(hangs.values()), is_candidate and self._hangs.stalled(now_s, formed_s=formed_s)

    def _measure_recovery(self, plan: Plan, beats: Sequence[Beat], now_s: float) -> None:
        """From a plan that interrupts a step to the first commit of its generation."""
        if plan.generation != self._plan_generation:
            self._plan_generation, self._planned_s = plan.generation, now_s if plan.abort else None
        if self._planned_s is not None and any(
            beat.trained_in == plan.generation for beat in beats
        ):
            self._hangs.limits.cured(now_s - self._planned_s)
            self._planned_s = None
