"""A coordinator continues the run of the previous one.

A membership is the replay of its events, so the state is made from the log. The last events may
have been written and not carried out: their outputs are repeated (:func:`retell`). A regroup or a
ruling that was left half-way is decided again once the nodes are back (:func:`resume_ruling`,
:func:`renew_inherited`).

-> coordinator/log.py: the takeover of the log, and the fence against the old coordinator.
agent/coordinator_link.py: how nodes find the new coordinator, and what they repeat.
substrate/cluster/supervised.py starts it; coordinator/handlers/on_node.py: a node reconnects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chaoskit.coordinator.commit import announce_loss, commit
from chaoskit.coordinator.effects import announce_size
from chaoskit.coordinator.handlers.on_generation import renew
from chaoskit.coordinator.handlers.on_node import REATTACH_S
from chaoskit.coordinator.handlers.on_rule_fired import give_up_ruled
from chaoskit.coordinator.losses import LostWorker, lost_workers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.notes import note_of_end, note_of_event, note_of_plan, note_of_set_aside
from chaoskit.coordinator.outputs import LogEntry, Output
from chaoskit.coordinator.state import PlaneState
from chaoskit.wire.messages import EndJob, NodeLost, Suspicion, WorkerLost

# -- replay of the log -----------------------------------------------------------------------------


def replay(state: PlaneState, entries: Sequence[LogEntry], now_s: float) -> None:
    """Bring a new ``state`` to that of the coordinators before this one, from their log.

    The clock of another machine may read anything, so the last event counts as just now. Every
    replay of the log must come to the same plans, so the time of the membership continues from the
    last event. The outputs of the last events are kept for :func:`retell`.

    Args:
        entries: the log; it has at least one entry.
    """
    past, membership = state.past, state.membership
    past.begun = past.resuming = True
    last_s = entries[-1].now_s
    past.lag_s = now_s - (last_s - entries[-1].lag_s)
    for entry in entries:
        losses = lost_workers(entry.event, membership, entry.now_s)
        is_last = entry.now_s == last_s  # decided together: the earlier ones were carried out
        if is_last:
            past.unconfirmed += note_of_event(entry.event, entry.now_s)
            past.unconfirmed += announce_loss(state, entry.event, losses, entry.now_s)
        _restore_detectors(state, entry, now_s)
        outputs = _replay_event(state, entry, losses)
        if is_last:
            past.unconfirmed += outputs
    if membership.nodes or membership.plan is not None:
        state.nodes.attendance.begin()
    for node in membership.nodes:
        state.detectors.contact.expect(node, now_s + REATTACH_S)
    _restore_forming(state)


def _restore_forming(state: PlaneState) -> None:
    """Open the rendezvous of the last plan, and note whether its generation has settled."""
    membership, forming = state.membership, state.forming
    if membership.plan is not None:
        state.nodes.have_met = True
        state.board.begin(membership.generation, membership.world)
    if membership.settled:
        forming.settled = membership.generation
    else:
        forming.inherited = membership.generation


def _restore_detectors(state: PlaneState, entry: LogEntry, now_s: float) -> None:
    """Have the parts beside the membership take in an event: arrivals, limits and rulings."""
    match entry.event:
        case events.NodeJoined(node):
            state.nodes.joined[node] = entry.event
            state.nodes.lost_nodes.pop(node, None)
        case NodeLost(node, detail):
            state.nodes.lost_nodes[node] = detail
        case events.GenerationSeen():
            state.nodes.attendance.admit_all_by(now_s + REATTACH_S)
            state.nodes.attendance.admit_none_before(now_s + REATTACH_S)
        case WorkerLost(suspicion=Suspicion() as suspicion):
            state.detectors.watch.limits.suspect(suspicion)
        case events.Ruled():
            state.detectors.rulings.take_in(entry.event, entry.now_s - entry.lag_s)
            state.past.ruled = entry.event


def _replay_event(state: PlaneState, entry: LogEntry, losses: Sequence[LostWorker]) -> list[Output]:
    """Have the membership take in an event again; return the outputs for journal and observers.

    The messages to nodes were sent, or are sent when the nodes attach.
    """
    outputs: list[Output] = []
    event, membership, then_s = entry.event, state.membership, entry.now_s - entry.lag_s
    state.reasons.note(event, losses, membership)
    for action in handle(membership, event, then_s):
        match action:
            case events.Publish(plan):
                outputs.append(
                    note_of_plan(state.reasons.explain(plan, membership.size), entry.now_s)
                )
            case events.OrderStart(node, worker):
                state.workers.node_of[worker] = node
            case events.FinishJob(ok, reason):
                state.ending.end = EndJob(ok, reason)
                outputs.append(note_of_end(ok, reason, entry.now_s))
            case events.SetAside(node):
                outputs.append(note_of_set_aside(node, state.config.strikes_max, entry.now_s))
    if state.elasticity is not None:  # its decisions come next in the log, or are still wanted
        state.elasticity.take_in(event, membership, then_s)
        if isinstance(event, events.Resized):
            outputs += announce_size(state, event.reason, entry.now_s)
    return outputs


# -- the first moments -----------------------------------------------------------------------------


def retell(state: PlaneState) -> list[Output]:
    """Return, once, the outputs that the previous coordinator may not have carried out."""
    unconfirmed, state.past.unconfirmed = state.past.unconfirmed, []
    return unconfirmed


def resume_job(state: PlaneState, generation: int, now_s: float) -> list[Output]:
    """Commit that the job begins with the snapshots of an earlier run.

    Args:
        generation: the newest generation among the snapshots.
    """
    return commit(state, events.Resumes(generation), now_s)


def expect_no_longer(state: PlaneState, nodes: Iterable[str], now_s: float) -> None:
    """Give ``nodes`` no more time to reconnect than a lease: they are assumed to be lost."""
    for node in nodes:
        if node in state.membership.nodes:
            state.detectors.contact.expect(node, now_s)


def resume_ruling(state: PlaneState, now_s: float) -> list[Output]:
    """Give up the workers of the last ruling, once, when every node is back; no outputs before.

    The log may lack some of these losses. The time of an unsettled generation starts here, too.
    """
    if not state.past.resuming or not state.nodes.attendance.attached.issuperset(
        state.membership.nodes
    ):
        return []
    state.past.resuming = False
    state.forming.inherited_until_s = now_s + state.limits.forming_s
    return give_up_ruled(state, state.past.ruled, now_s) if state.past.ruled is not None else []


def renew_inherited(state: PlaneState, now_s: float) -> list[Output]:
    """Plan the generation again that the previous coordinator left unsettled, after its time.

    There are no outputs if it has settled.
    """
    forming = state.forming
    if forming.inherited_until_s is None or now_s < forming.inherited_until_s:
        return []
    forming.inherited_until_s = None
    if not forming.inherited or state.membership.settled:
        return []
    return renew(state, forming.inherited, "its coordinator ended while it was formed", now_s)


def renewal_due_s(state: PlaneState) -> float:
    """Return when a broken or unsettled generation is planned again; infinity for never."""
    broken, inherited_s = state.forming.broken, state.forming.inherited_until_s
    broken_s = broken.renew_s if broken is not None else math.inf
    return min(broken_s, inherited_s if inherited_s is not None else math.inf)


def may_reconnect(state: PlaneState, now_s: float) -> bool:
    """Return whether a node may still reconnect that has not received the end of the job.

    It may for :data:`REATTACH_S` after the start of a coordinator that continues a run.
    """
    return state.past.resuming and now_s < state.past.started_s + REATTACH_S
