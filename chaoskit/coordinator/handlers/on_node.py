"""A node joins, reconnects, falls silent or ends.

-> coordinator/detectors/contact.py decides which silent node is lost; wire/lease.py: its lease.
coordinator/membership/apply.py removes its workers. agent/coordinator_link.py: when a node gives
the coordinator up; agent/agent.py (``_end_all``) kills its workers then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from chaoskit.coordinator.commit import commit, commit_loss
from chaoskit.coordinator.effects import start_workers
from chaoskit.coordinator.losses import fact_missing_in_log
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Disconnect, Output, Send, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import AgentHello, NodeLost, Recall, StopWorker

#: Time that the nodes of the previous coordinator have to attach to a new one.
REATTACH_S = 2.0
#: Time until the first report of a new node, which forks its zygote before.
ATTACH_S = 2.0

# -- a node joins ----------------------------------------------------------------------------------


def attach(state: PlaneState, hello: AgentHello, now_s: float, *, term: int = 1) -> list[Output]:
    """Handle the connection of a node.

    A new agent joins the membership, at once or together with the other first nodes. If another
    agent had the node, that one is lost first. The same agent gets what it has missed. A node gets
    the end of the job if the job has ended. If a node knows more than the log, the log has lost
    entries: that is written to the journal, and may fail the job.

    Raises:
        Refused: if another agent is connected under the name of the node.
    """
    node, attendance, detectors = hello.node, state.nodes.attendance, state.detectors
    registration = events.NodeJoined(node, f"{hello.host_id}/{hello.pid}", hello.started)
    former_registration = state.nodes.joined.get(node)
    is_same_agent = (
        former_registration is not None
        and former_registration.incarnation == registration.incarnation
    )
    if is_same_agent:
        attendance.reconnect(node)
    else:
        attendance.connect(node)
    if state.ending.end is not None:
        return [Send(node, state.ending.end)]
    detectors.links.introduce(hello)
    detectors.link_speeds.introduce(hello)
    detectors.newcomers.introduce(hello)
    if hello.term >= term or hello.started:  # it was in the run before, and so were others
        attendance.admit_none_before(now_s + REATTACH_S)
    outputs: list[Output] = []
    if detail := fact_missing_in_log(hello, state.membership, term):
        outputs += _report_lost_log(state, hello, detail, now_s)
        if state.membership.finished:
            return outputs
    if node in state.membership.nodes:
        if is_same_agent:
            return outputs + _resynchronise(state, hello, now_s)
        outputs += _lose_node(state, node, "another agent came in its place", now_s)
    state.nodes.joined[node] = registration
    state.nodes.lost_nodes.pop(node, None)
    detectors.fitness.forget(node)
    detectors.newcomers.forget(node)
    detectors.clocks.forget(node)
    outputs += [Send(node, StopWorker(worker, "fenced")) for worker in hello.workers]
    return outputs + admit(state, attendance.arrive(node, now_s), now_s)


def admit(state: PlaneState, nodes: Sequence[str], now_s: float) -> list[Output]:
    """Commit that ``nodes`` join the membership, and start their leases."""
    outputs: list[Output] = []
    for node in nodes:
        state.detectors.contact.beat(node, now_s)
        state.detectors.contact.expect(node, now_s + ATTACH_S)
        registration = msgspec.structs.replace(
            state.nodes.joined[node], proves=_may_prove(state, node)
        )
        outputs += commit(state, registration, now_s)
    return outputs


def admit_due(state: PlaneState, now_s: float) -> list[Output]:
    """Admit the first nodes once all have come, or they have waited long enough."""
    return admit(state, state.nodes.attendance.due(now_s), now_s)


def _may_prove(state: PlaneState, node: str) -> bool:
    """Return whether a node that joins can be measured before it gets workers.

    It can if no rank is missing.
    """
    membership = state.membership
    is_full = membership.settled and len(membership.members) >= membership.size
    return is_full and state.config.health == "enforce" and state.detectors.newcomers.can_test(node)


def _report_lost_log(
    state: PlaneState, hello: AgentHello, detail: str, now_s: float
) -> list[Output]:
    """Write to the journal that a node knows more than the log, and commit what it has seen.

    The log, or its end, was lost.
    """
    newest = state.membership.newest_known
    fields = {"node": hello.node, "generation": hello.generation, "known": newest, "detail": detail}
    if hello.generation > newest:
        # the other nodes of that generation connect soon, or never
        state.nodes.attendance.admit_all_by(now_s + REATTACH_S)
    note = WriteRecord(Event.RECORD_LOST, fields)
    if not hello.generation and not hello.started:
        return [note]
    return [
        note,
        *commit(state, events.GenerationSeen(hello.generation, hello.node, hello.started), now_s),
    ]


def _resynchronise(state: PlaneState, hello: AgentHello, now_s: float) -> list[Output]:
    """Return the orders that a node needs which has reconnected and was never given up.

    Workers that the log does not have are ended, those that were not started are ordered again. The
    last plan and an open question about copies are repeated.
    """
    node, membership, workers = (
        hello.node,
        state.membership,
        state.membership.workers_on(hello.node),
    )
    state.detectors.contact.beat(node, now_s)
    state.workers.ended |= workers.intersection(hello.ended)
    unknown_workers = sorted(set(hello.workers) - workers)
    held = state.schedules.starts.held  # ordered when they are released
    unstarted_workers = sorted(workers - {*hello.workers, *hello.ended, *held})
    outputs: list[Output] = [Send(node, StopWorker(worker, "fenced")) for worker in unknown_workers]
    outputs += start_workers(state, unstarted_workers, now_s)
    plan = state.reasons.plan
    if plan is not None and hello.generation < plan.generation:
        outputs.append(Send(node, plan))
    if membership.awaits_answer_of(node):
        outputs.append(Send(node, Recall(membership.question_number)))
    return outputs


# -- a node ends -----------------------------------------------------------------------------------


def detach(
    state: PlaneState, node: str, detail: str, now_s: float, *, dead: bool = False
) -> list[Output]:
    """Handle the end of a node's connection, for the reason ``detail``.

    The node is lost at once if its agent is ``dead``. Otherwise it may reconnect until its lease
    runs out. A node that is no member, or of a job that has ended, is only disconnected.
    """
    contact = state.detectors.contact
    state.nodes.attendance.disconnect(node)
    if state.ending.end is not None or node not in state.membership.nodes:
        contact.drop(node)
        return [Disconnect(node)]
    if dead:
        contact.drop(node)
        return [Disconnect(node), *_lose_node(state, node, detail, now_s)]
    contact.leave(node, detail)
    return [Disconnect(node)]


def give_up_silent(state: PlaneState, now_s: float) -> list[Output]:
    """Disconnect silent nodes and commit their loss, if the others can train on without them."""
    outputs: list[Output] = []
    contact = state.detectors.contact
    while lost := contact.lost(state.membership.keepers, now_s):
        node, detail = lost[0]  # judge the rest anew: this node may have the last state
        contact.drop(node)
        state.nodes.attendance.disconnect(node)
        outputs += [Disconnect(node), *_lose_node(state, node, detail, now_s, silent=True)]
    return outputs


def _lose_node(
    state: PlaneState, node: str, detail: str, now_s: float, *, silent: bool = False
) -> list[Output]:
    return commit_loss(state, NodeLost(node, detail, state.nodes.have_met, silent), now_s)
