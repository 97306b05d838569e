"""Everything that a coordinator decides, as one pure state machine over what its nodes say.

Outputs are to be carried out in their order. :class:`Remember` comes before what follows from it: a plane that is made
from the remembered events of one that ended goes on where that one was, because a membership is the replay of its
events. What the nodes know, they say again when they attach to a new coordinator: everything here may be heard twice.

The plane is built up in layers, each on what is below it: ``decisions.py`` (carried out), ``sizing.py`` (how large the
world is), ``generations.py`` (whether a plan comes about), ``attention.py`` (whom to go on without), ``nodes.py`` (who
comes and goes), ``inheritance.py`` (what outlives a coordinator), ``hearing.py`` (what is heard).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.hearing import Hearing
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.membership.rendezvous import Client
from chaoskit.coordinator.outputs import End, Output, Remember, Send
from chaoskit.wire import messages
from chaoskit.wire.messages import Store

_FORMING_TICK_S = 0.02


class ControlPlane(Hearing):
    """Serves one run.

    Args:
        memory: what the coordinators before this one have remembered, in order.
        policies: what it decides by.
        limits: how long it waits for others.
    """

    def __init__(
        self,
        config: RunConfig,
        memory: Sequence[Remember] = (),
        now_s: float = 0.0,
        *,
        policies: Policies = POLICIES,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(config, memory, now_s, policies, limits)

    @property
    def membership(self) -> Membership:
        """Who is in."""
        return self._membership

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self._end is not None

    def picture(self) -> list[messages.Message]:
        """What an observer that comes now must be told."""
        plan = self._reasons.plan
        told: list[messages.Message] = [*self._facts.tell()]
        told += [messages.NodeLost(node, detail) for node, detail in self._gone.items()]
        if plan is not None:
            told.append(plan)
        if self._elasticity is not None:
            told.append(self._world_size(""))
        if self._end is not None:
            told.append(self._end)
        return told

    def ask(self, client: Client, request: Any) -> list[Output]:
        """A request of a worker to the rendezvous."""
        replies = self._board.ask(client, request)
        self._met |= 0 < self._membership.world <= len(self._board.arrived(messages.STANDING))
        return [*replies]

    def hang_up(self, client: Client) -> None:
        """A worker closed its connection to the rendezvous."""
        self._board.forget(client)

    def next_tick_s(self, now_s: float) -> float:
        """When :meth:`tick` must be called, if nothing is heard until then: at a moment that is known to matter.

        While a generation is formed, or copies are sought, every few milliseconds.
        """
        due_s = min(self._contact.next_look_s(), *self._generation_due_s())
        return min(due_s, now_s + _FORMING_TICK_S) if self._membership.is_forming else due_s

    def tick(
        self, now_s: float, starved_s: Mapping[str, float], acknowledged: Collection[str] = ()
    ) -> list[Output]:
        """To be called when all input was read, and at the time that :meth:`next_tick_s` says.

        Args:
            starved_s: node -> time since the last call in which its agent waited for a CPU: no silence of its own.
            acknowledged: nodes whose kernels have acknowledged the :class:`~chaoskit.wire.messages.Probe` sent to them.
        """
        if self._end is not None:
            return [] if self._may_be_asked(now_s) else [End()]
        for node, by_s in starved_s.items():
            self._contact.extend(node, by_s)
        outputs: list[Output] = []
        self._contact.listen(self._membership.keepers, now_s, acknowledged)
        outputs += [Send(node, messages.Probe()) for node in self._contact.ask(now_s)]
        outputs += self._give_up_silent(now_s)
        outputs += self._look_at_beats(now_s)
        outputs += self._look_at_links(now_s)
        outputs += self._admit(self._attendance.due(now_s), now_s)
        outputs += self._keep_unfit_out(now_s)
        outputs += self._test_newcomers(now_s)
        outputs += self._give_up_late(now_s)
        outputs += self._resume(now_s)
        outputs += self._stall_broken(now_s)
        outputs += self._stall_inherited(now_s)
        outputs += self._look_at_size(now_s)
        if (step := self._timetable.due(now_s)) is not None:
            outputs += [Send(node, Store(step)) for node in sorted(self._membership.nodes)]
        outputs += self._store_before_end(now_s)
        return outputs + self._advance(events.Tick(), now_s)
