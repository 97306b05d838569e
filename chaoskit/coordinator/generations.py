"""Whether the generation of today comes about: its members form a group, or are planned again."""

from __future__ import annotations

import math
from typing import NamedTuple

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.links import SUSPICION_S
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.membership.repeats import Repeats
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import Output
from chaoskit.coordinator.sizing import Sizing
from chaoskit.wire.messages import GroupBroken, Plan

STALLS_MAX = 20
#: A lost rank is usually known sooner than the broken collectives it leaves behind.
BROKEN_GRACE_S = 0.15


class _Broken(NamedTuple):
    """The first report that a generation is broken."""

    renew_s: float  #: when to plan it again, if no loss has explained it by then
    worker: str
    detail: str


class Generations(Sizing):
    """Decisions, and whether those who are to follow a plan can."""

    def __init__(self, config: RunConfig, now_s: float, policies: Policies, limits: Limits) -> None:
        super().__init__(config, now_s, policies, limits)
        self._stalls = Repeats(tolerated=STALLS_MAX)
        self._suspicious_until_s = -math.inf  # a generation broke, and no loss explains it
        self._formed: set[str] = set()
        self._settled = 0
        self._ended: set[str] = (
            set()
        )  # workers that a node has reported as ended, and whose loss is not taken in yet
        self._broken: _Broken | None = None

    def _publish(self, plan: Plan, now_s: float) -> list[Output]:
        self._formed.clear()
        self._broken = None
        return super()._publish(plan, now_s)

    def _note_formed(self, worker: str, generation: int, now_s: float) -> list[Output]:
        if generation != self._membership.generation:
            return []
        self._formed.add(worker)
        if self._settled == generation or not self._formed.issuperset(self._membership.members):
            return []
        return self._settle(generation, now_s)

    def _note_trained(self, generation: int, now_s: float) -> list[Output]:
        """A rank committed a step in ``generation``: all its members had built the group.

        Those that are lost cannot say so any more, and those whose agents are slow cannot say so yet.
        """
        return (
            self._settle(generation, now_s) if self._membership.may_have_worked(generation) else []
        )

    def _settle(self, generation: int, now_s: float) -> list[Output]:
        self._settled = max(self._settled, generation)
        ended = self._ended.intersection(self._membership.members)
        settled = events.Settled(generation, tuple(sorted(ended)))
        return [*note_of_event(settled, now_s), *self._advance(settled, now_s)]

    def _note_broken(self, report: GroupBroken, now_s: float) -> None:
        if report.generation == self._membership.generation and self._broken is None:
            self._broken = _Broken(now_s + BROKEN_GRACE_S, report.worker, report.detail)

    def _stall(self, generation: int, detail: str, now_s: float, by: str = "") -> list[Output]:
        """Plan the same members again, unless that did not help often enough."""
        if generation != self._membership.generation:
            return []
        self._suspicious_until_s = now_s + SUSPICION_S
        if self._stalls.note("stalled", self._watch.committed):
            reason = f"no step is committed after {STALLS_MAX} new starts: {detail}"
            return self._advance(events.JobFailed(reason), now_s)
        return self._advance(events.Stalled(generation, by), now_s)

    def _stall_broken(self, now_s: float) -> list[Output]:
        """Plan a broken generation again, if no loss has explained it by now."""
        broken = self._broken
        if broken is None or now_s < broken.renew_s:
            return []
        outputs = self._stall(self._membership.generation, broken.detail, now_s, broken.worker)
        self._broken = None
        return outputs
