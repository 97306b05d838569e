"""What outlives a coordinator: the plane of the next one goes on where that of the last one was.

A membership is the replay of its events, so the plane is made from what was remembered. Its last events may have been
written down and not carried out: what they say is told again, and what they left half-way is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import Limits
from chaoskit.coordinator.membership.policies import Policies
from chaoskit.coordinator.nodes import REATTACH_S, Nodes
from chaoskit.coordinator.notes import note_of_end, note_of_event, note_of_plan, note_of_set_aside
from chaoskit.coordinator.outputs import Output, Remember
from chaoskit.wire.messages import EndJob


class Inheritance(Nodes):
    """Decisions that go on from those of the coordinators before.

    Args:
        memory: what they have remembered, in order.
    """

    def __init__(
        self,
        config: RunConfig,
        memory: Sequence[Remember],
        now_s: float,
        policies: Policies,
        limits: Limits,
    ) -> None:
        super().__init__(config, now_s, policies, limits)
        self._inherited = 0  # a generation that the coordinator before this one left unsettled
        self._inherited_until_s: float | None = None
        self._ruled: events.Ruled | None = (
            None  # the last one: of the losses that it decided some may not be written
        )
        self._untold: list[
            Output
        ] = []  # decisions of which the coordinator before this one may not have told
        self._started_s = now_s
        self._begun = self._resuming = bool(memory)
        if memory:
            self._recall(memory, now_s)

    def _recall(self, memory: Sequence[Remember], now_s: float) -> None:
        # The clock of another machine may read anything: the last event counts as just now. Every replay of the record
        # must come to the same plans, so the time of the membership goes on where it was.
        self._lag_s = now_s - (memory[-1].now_s - memory[-1].lag_s)
        for entry in memory:
            is_last = (
                entry.now_s == memory[-1].now_s
            )  # decided and written down together: all before was carried out
            if is_last:
                self._untold += note_of_event(entry.event, entry.now_s)
                self._untold += self._tell_loss(entry.event, entry.now_s)
            self._know_again(entry, now_s)
            told = self._replay(entry)
            if is_last:
                self._untold += told
        if self._membership.nodes or self._membership.plan is not None:
            self._attendance.begin()
        for node in self._membership.nodes:
            self._contact.expect(node, now_s + REATTACH_S)
        if self._membership.plan is not None:
            self._met = True
            self._board.begin(self._membership.generation, self._membership.world)
        if self._membership.settled:
            self._settled = self._membership.generation
        else:
            self._inherited = self._membership.generation

    def expect_no_longer(self, nodes: Iterable[str], now_s: float) -> None:
        """Give these nodes no more time to come than a lease: they are known to be lost, or held for that."""
        for node in nodes:
            if node in self._membership.nodes:
                self._contact.expect(node, now_s)

    def _know_again(self, entry: Remember, now_s: float) -> None:
        """What an event says to others than the membership."""
        match entry.event:
            case events.NodeJoined(node):
                self._joined[node] = entry.event
                self._gone.pop(node, None)
            case events.NodeLost(node, detail):
                self._gone[node] = detail
            case events.GenerationSeen():
                self._attendance.hurry(now_s + REATTACH_S)
                self._attendance.linger(now_s + REATTACH_S)
            case events.WorkerLost(suspicion=events.Suspicion() as suspicion):
                self._watch.limits.suspect(suspicion)
            case events.Ruled():
                self._rulings.take_in(entry.event, entry.now_s - entry.lag_s)
                self._ruled = entry.event

    def _replay(self, entry: Remember) -> list[Output]:
        """Take in an event again. What follows from it was carried out, or is repeated when the nodes attach.

        Returns:
            What the journal says of it.
        """
        told: list[Output] = []
        self._reasons.note(entry.event, self._membership, entry.now_s)
        for action in self._membership.handle(entry.event, entry.now_s - entry.lag_s):
            if isinstance(action, events.Publish):
                plan = self._reasons.tell(action.plan, self._membership.size)
                told.append(note_of_plan(plan, entry.now_s))
            elif isinstance(action, events.StartWorker):
                self._hosts[action.worker] = action.node
            elif isinstance(action, events.Finish):
                self._end = EndJob(action.ok, action.reason)
                told.append(note_of_end(action.ok, action.reason, entry.now_s))
            elif isinstance(action, events.SetAside):
                told.append(note_of_set_aside(action.node, self._config.strikes_max, entry.now_s))
        if (
            self._elasticity is not None
        ):  # what follows from it comes next in the record, or is wanted still
            self._elasticity.take_in(entry.event, self._membership, entry.now_s - entry.lag_s)
            if isinstance(entry.event, events.Resized):
                told += self._tell_size(entry.event.reason, entry.now_s)
        return told

    def resume(self, generation: int, now_s: float) -> list[Output]:
        """Begin with what an earlier run has stored, the newest of it in ``generation``. To be called first."""
        return self._advance(events.Resumes(generation), now_s)

    def retell(self) -> list[Output]:
        """What the coordinator before this one may not have lived to say. To be said before anything else."""
        untold, self._untold = self._untold, []
        return untold

    def _resume(self, now_s: float) -> list[Output]:
        """Once every node is back that comes back: what the last coordinator left half-way is repeated.

        That is a regroup, later, and a log rule's loss of several workers.
        """
        if not (self._resuming and self._attendance.attached.issuperset(self._membership.nodes)):
            return []
        self._resuming = False
        self._inherited_until_s = now_s + self._limits.forming_s
        return self._carry_out_ruling(self._ruled, now_s) if self._ruled is not None else []

    def _generation_due_s(self) -> tuple[float, float]:
        """When a generation is planned again: one that broke, and one that the last coordinator left unsettled."""
        broken_s = self._broken.renew_s if self._broken is not None else math.inf
        return (
            broken_s,
            self._inherited_until_s if self._inherited_until_s is not None else math.inf,
        )

    def _stall_inherited(self, now_s: float) -> list[Output]:
        """Plan the generation again that the last coordinator left unsettled, if it has not formed by now."""
        if self._inherited_until_s is None or now_s < self._inherited_until_s:
            return []
        self._inherited_until_s = None
        if not self._inherited or self._membership.settled:
            return []
        return self._stall(self._inherited, "its coordinator ended while it was formed", now_s)

    def _may_be_asked(self, now_s: float) -> bool:
        """Whether somebody who has not heard of the end from the coordinator before this one will ask now."""
        return self._resuming and now_s < self._started_s + REATTACH_S
