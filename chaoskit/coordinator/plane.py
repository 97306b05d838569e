"""All decisions of a coordinator, as one pure state machine over the messages of its nodes.

Outputs are to be carried out in their order. :class:`~chaoskit.coordinator.outputs.LogEntry` comes
before what follows from it: a plane that is made from the log entries of another one goes on where
that one was. Nodes report what they know again when they attach to a new coordinator, so each
message may arrive twice.

:data:`HANDLERS` maps each kind of message to its handler. :data:`TICK` lists the checks that are
made as time passes.

-> coordinator/state.py: the data; coordinator/commit.py: the way to the membership;
coordinator/server.py: the connections, the log, and the messages that are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.effects import world_size
from chaoskit.coordinator.handlers import (
    on_copies,
    on_end,
    on_generation,
    on_heartbeat,
    on_measurement,
    on_node,
    on_restart,
    on_rule_fired,
    on_size_request,
    on_worker_lost,
    on_worker_ready,
)
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.limits import LIMITS, Limits
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.policies import POLICIES, Policies
from chaoskit.coordinator.outputs import End, LogEntry, Output, Send
from chaoskit.coordinator.rendezvous import Client
from chaoskit.coordinator.state import PlaneState, new_state
from chaoskit.errors import Refused
from chaoskit.wire import messages
from chaoskit.wire.messages import AgentHello, WorkerFailed

_FORMING_TICK_S = 0.02

Handler = Callable[[PlaneState, Any, float], list[Output]]

HANDLERS: dict[type[messages.Message], Handler] = {
    messages.Heartbeat: on_heartbeat.heartbeat,
    messages.WorkerReady: on_worker_ready.worker_ready,
    messages.WorkerLost: on_worker_lost.worker_lost,
    messages.Accuse: on_worker_lost.accused,
    messages.WorkerFailed: on_end.worker_failed,
    messages.WorkerDone: on_end.worker_done,
    messages.Halt: on_end.halt_job,
    messages.EndJob: on_end.end_job,
    messages.Formed: on_generation.formed,
    messages.Healed: on_generation.healed,
    messages.GroupBroken: on_generation.group_broken,
    messages.Sealed: on_copies.sealed,
    messages.SourceFailed: on_copies.source_failed,
    messages.LinksTested: on_measurement.links_tested,
    messages.LinksMeasured: on_measurement.links_measured,
    messages.HealthReport: on_measurement.health_reported,
    messages.LinesMatched: on_rule_fired.lines_matched,
    messages.RuleFired: on_rule_fired.rule_fired,
    messages.ScaleTo: on_size_request.size_requested,
    messages.LendNodes: on_size_request.size_requested,
    messages.SpotNotice: on_size_request.size_requested,
    messages.NoticeCancelled: on_size_request.size_requested,
    messages.ReturnNodes: on_size_request.size_requested,
}

TICK: tuple[Callable[[PlaneState, float], list[Output]], ...] = (
    on_node.give_up_silent,
    on_heartbeat.judge_ranks,
    on_measurement.judge_links,
    on_node.admit_due,
    on_measurement.keep_unfit_out,
    on_measurement.measure_newcomers,
    on_worker_ready.give_up_late,
    on_restart.resume_ruling,
    on_generation.renew_broken,
    on_restart.renew_inherited,
    on_size_request.tick_policy,
    on_end.store_by_time,
    on_end.store_before_end,
)


class ControlPlane:
    """The decisions of the coordinator of one run. Its calls return outputs, and send nothing.

    Args:
        entries: the entries that earlier coordinators of the run wrote to the log, in order.
        now_s: time of the start, on CLOCK_MONOTONIC, as all other times.
        policies: the decisions that tests replace.
        limits: time limits that are no settings.
    """

    def __init__(
        self,
        config: RunConfig,
        entries: Sequence[LogEntry] = (),
        now_s: float = 0.0,
        *,
        policies: Policies = POLICIES,
        limits: Limits = LIMITS,
    ) -> None:
        self._state = new_state(config, now_s, policies, limits)
        if entries:
            on_restart.replay(self._state, entries, now_s)

    # -- questions ---------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """The nodes and workers of the run."""
        return self._state.membership

    @property
    def ended(self) -> bool:
        """True if the job is over."""
        return self._state.ending.end is not None

    @property
    def attached(self) -> frozenset[str]:
        """Nodes that are connected."""
        return self._state.nodes.attendance.attached

    @property
    def lent(self) -> Mapping[str, str] | None:
        """Node that is lent -> the job that has it; None where no elastic policy has begun."""
        return self._state.elasticity.lent if self._state.elasticity is not None else None

    def messages_for_observer(self) -> list[messages.Message]:
        """Return the messages that a new observer must receive, so that it knows the present state.

        They are facts about workers, lost nodes, the last plan, the size, and the end.
        """
        state = self._state
        facts: list[messages.Message] = [*state.facts.tell()]
        facts += [
            messages.NodeLost(node, detail) for node, detail in state.nodes.lost_nodes.items()
        ]
        if state.reasons.plan is not None:
            facts.append(state.reasons.plan)
        if state.elasticity is not None:
            facts.append(world_size(state, ""))
        if state.ending.end is not None:
            facts.append(state.ending.end)
        return facts

    def next_tick_s(self, now_s: float) -> float:
        """Return when :meth:`tick` must be called if no message comes until then.

        While a generation is formed, or copies are searched for, that is within 20 ms.
        """
        state = self._state
        due_s = min(state.detectors.contact.next_look_s(), on_restart.renewal_due_s(state))
        return min(due_s, now_s + _FORMING_TICK_S) if state.membership.is_forming else due_s

    # -- nodes -------------------------------------------------------------------------------------

    def attach(self, hello: AgentHello, now_s: float, *, term: int = 1) -> list[Output]:
        """Handle the connection of a node.

        Args:
            term: the number of this coordinator, as its log has it.

        Raises:
            Refused: if another agent is connected under the name of the node.
        """
        return on_node.attach(self._state, hello, now_s, term=term)

    def detach(self, node: str, detail: str, now_s: float, *, dead: bool = False) -> list[Output]:
        """Handle the end of a node's connection.

        Args:
            dead: its agent is known to have ended, and its workers with it.
        """
        return on_node.detach(self._state, node, detail, now_s, dead=dead)

    def expect_no_longer(self, nodes: Iterable[str], now_s: float) -> None:
        """Give ``nodes`` no more time to connect than a lease, as they are assumed to be lost."""
        on_restart.expect_no_longer(self._state, nodes, now_s)

    # -- messages ----------------------------------------------------------------------------------

    def hear(self, message: Any, now_s: float) -> list[Output]:
        """Handle a message of an agent, of a worker through its agent, or of an observer.

        The message is kept for later observers, if they need it. Unless it is a heartbeat, the
        progress of the heartbeats before it is judged first.

        Raises:
            Refused: if it is no message to a coordinator.
        """
        handler, state = HANDLERS.get(type(message)), self._state
        if handler is None:
            raise Refused(f"unexpected {type(message).__name__}")
        if handler is on_heartbeat.heartbeat:
            return handler(state, message, now_s)
        # most failures are left to the agent, which reports the loss
        if not isinstance(message, WorkerFailed):
            state.facts.note(message)
        # these heartbeats came before the message, and may not hold after it
        outputs = on_heartbeat.judge_ranks(state, now_s)
        return outputs + handler(state, message, now_s)

    def ask(self, client: Client, request: Any) -> list[Output]:
        """Handle a request of a worker to the rendezvous, and return the replies.

        The plane notes when all ranks of a plan have met.

        Raises:
            Refused: if it is no request to a rendezvous, or of a rank that the world does not have.
        """
        state = self._state
        replies = state.board.ask(client, request)
        state.nodes.have_met |= (
            0 < state.membership.world <= len(state.board.arrived(messages.STANDING))
        )
        return [*replies]

    def hang_up(self, client: Client) -> None:
        """Handle the end of a worker's connection to the rendezvous."""
        self._state.board.forget(client)

    # -- time --------------------------------------------------------------------------------------

    def tick(
        self, now_s: float, starved_s: Mapping[str, float], acknowledged: Collection[str] = ()
    ) -> list[Output]:
        """Return the outputs that are due by time.

        To be called when all input was read, and at :meth:`next_tick_s`. After the end of the job,
        the only output is :class:`End`, once no node can ask for the end any more.

        Args:
            starved_s: node -> seconds since the last call in which its agent waited for a CPU,
                which is no silence.
            acknowledged: nodes with a kernel that has acknowledged the
                :class:`~chaoskit.wire.messages.Probe` to it.
        """
        state, contact = self._state, self._state.detectors.contact
        if self.ended:
            return [] if on_restart.may_reconnect(state, now_s) else [End()]
        for node, by_s in starved_s.items():
            contact.extend(node, by_s)
        contact.listen(state.membership.keepers, now_s, acknowledged)
        outputs: list[Output] = [Send(node, messages.Probe()) for node in contact.ask(now_s)]
        for check in TICK:
            outputs += check(state, now_s)
        return outputs + commit(state, events.Tick(), now_s)

    def commit(self, event: events.MembershipEvent, now_s: float) -> list[Output]:
        """Have the membership take in an event that no message brings."""
        return commit(self._state, event, now_s)

    # -- the coordinator before --------------------------------------------------------------------

    def retell(self) -> list[Output]:
        """Return, once, the outputs that the coordinator before this one may not have carried out.

        They are to be carried out first.
        """
        return on_restart.retell(self._state)

    def resume(self, generation: int, now_s: float) -> list[Output]:
        """Begin with the snapshots of an earlier run, the newest of them of ``generation``.

        To be called first.
        """
        return on_restart.resume_job(self._state, generation, now_s)
