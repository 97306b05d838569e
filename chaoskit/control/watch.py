"""What the progress boards of all workers say together: who hangs, and who does not follow. A pure state machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from chaoskit.config import RunConfig
from chaoskit.control.hang import HangDetector
from chaoskit.control.muster import Muster
from chaoskit.messages import Beat, Plan
from chaoskit.vocabulary import Phase

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
    ) -> tuple[dict[str, str], bool]:
        """Who of the ``members`` hangs, with details for people; and whether all wait for each other, instead.

        Args:
            plan: of the last generation.
            arrived: members that have come to its rendezvous.
            worked: the last generation of which all have built the group. Where the plan does not abort, it goes on
                until a step boundary, and how long a rank had waited before it is of no interest.
            over: the plan is given up, and there is no newer one yet: nobody need follow it.
        """
        beats = [self._beats[worker] for worker in members if worker in self._beats]
        late = [] if over else self._muster.observe(plan, beats, set(arrived), now_s, worked=worked)
        hangs = {hang.worker: hang for hang in late}
        hanging = self._hangs.observe(beats, now_s)
        # Whoever has no copy to restore from waits there for the next plan.
        hangs |= {hang.worker: hang for hang in hanging if not (over and hang.phase == Phase.RESTORE)}
        if worked != self._worked:
            self._worked, self._worked_s = worked, now_s
        if plan.abort:
            gathered = all(beat.generation == plan.generation for beat in beats)
        else:
            gathered = all(self._heard_s[beat.worker] > self._worked_s + _BELATED_S for beat in beats)
        stalled = not hangs and gathered and len(beats) == len(members) and self._hangs.stalled(now_s)
        details = {
            hang.worker: f"{Phase(hang.phase).label} for {hang.age_s * 1000:.0f} ms, "
            f"limit {hang.limit_s * 1000:.0f} ms, while others wait"
            for hang in hangs.values()
        }
        return details, stalled
