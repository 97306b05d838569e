"""The only way to the membership: an event is logged, taken in, and followed by its effects.

These functions return the outputs in that order; they write and send nothing.

-> coordinator/membership/handle.py changes the membership; coordinator/effects.py makes messages of
its actions. coordinator/server.py writes the log, then sends. coordinator/log.py: the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaoskit.coordinator.effects import (
    announce_answer,
    announce_size,
    effects_of,
    start_workers,
    world_size,
)
from chaoskit.coordinator.losses import LostWorker, lost_workers
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.handle import handle
from chaoskit.coordinator.notes import note_of_event
from chaoskit.coordinator.outputs import LogEntry, Output, Show, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.elastic.decisions import Answer, Evict
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import NodeLost


def commit(state: PlaneState, event: events.MembershipEvent, now_s: float) -> list[Output]:
    """Have the membership and the elastic policy take in an event; return all outputs, in order.

    The first output writes the event to the log. There are no outputs, and no entry in the log,
    after the end of the job. Nor are there any for a tick without actions, unless it is the first
    event. Events that the policy decides are committed, too. Use :func:`commit_loss` for an event
    that takes workers away: it announces the losses, too.
    """
    return _commit(state, event, lost_workers(event, state.membership, now_s), now_s)


def commit_loss(state: PlaneState, event: events.MembershipEvent, now_s: float) -> list[Output]:
    """Announce the workers that an event takes away, forget their progress, and commit the event.

    Return the lines of the journal and the messages to observers, then the outputs of
    :func:`commit`. The lines and messages are returned after the end of the job, too.
    """
    losses = lost_workers(event, state.membership, now_s)
    outputs = [*note_of_event(event, now_s), *announce_loss(state, event, losses, now_s)]
    for loss in losses:
        state.detectors.watch.forget(loss.message.worker)
    return outputs + _commit(state, event, losses, now_s)


def _commit(
    state: PlaneState, event: events.MembershipEvent, losses: Sequence[LostWorker], now_s: float
) -> list[Output]:
    outputs = _take_in(state, event, losses, now_s)
    return outputs + _resize(state, event, now_s) if outputs else []


def announce_loss(
    state: PlaneState, event: events.MembershipEvent, losses: Sequence[LostWorker], now_s: float
) -> list[Output]:
    """Return the journal lines and the messages to observers about the losses by an event.

    Called before the membership takes the event in. The losses are kept for later observers. Two
    coordinators may announce the same loss. Spares of a lost node are not announced one by one.
    """
    outputs: list[Output] = []
    if isinstance(event, NodeLost) and event.node in state.membership.nodes:
        outputs.append(
            WriteRecord(
                Event.NODE_LOST, {"node": event.node, "detail": event.detail}, int(now_s * 1e9)
            )
        )
        outputs.append(Show(event))
        state.nodes.lost_nodes[event.node] = event.detail
    for loss, rank in losses:
        state.facts.note(loss)
        if rank is None and isinstance(event, NodeLost):
            continue
        fields = {"worker": loss.worker, "rank": rank, "cause": loss.cause, "detail": loss.detail}
        outputs += [WriteRecord(Event.DETECTED, fields, loss.detected_ns), Show(loss)]
    return outputs


def _take_in(
    state: PlaneState, event: events.MembershipEvent, losses: Sequence[LostWorker], now_s: float
) -> list[Output]:
    """Have the membership take in an event; return the entry for the log and the effects.

    There are none after the end of the job. A tick without actions has none, either, unless it is
    the first event. Starts of workers are held or released here, as the event begins or ends a
    recovery.
    """
    membership, past, starts = state.membership, state.past, state.schedules.starts
    if membership.finished:
        return []
    state.reasons.note(event, losses, membership)
    actions = handle(membership, event, past.membership_s(now_s))
    # the start-up time counts from the first event, so that a replay must have it
    is_first = not past.begun
    past.begun = True
    if isinstance(event, events.Tick) and not actions and not is_first:
        return []
    outputs: list[Output] = [LogEntry(event, now_s, past.lag_s)]
    if (
        membership.is_sharded and membership.can_begin_with_copies
    ):  # with a spare: its successor can wait
        starts.recover(membership.newest_known + 1, membership.world, now_s)
    for action in actions:
        outputs += effects_of(state, action, now_s)
    if membership.is_short and not membership.can_begin_with_copies:
        # no step is repeated without replacements
        outputs += start_workers(state, starts.release(), now_s)
    return outputs


def _resize(state: PlaneState, event: events.MembershipEvent, now_s: float) -> list[Output]:
    """Have the elastic policy take in an event, and commit the size of the world that it decides.

    Return its answers to requests, its evictions, and the outputs of the new size. There are none
    in a run without elastic policy.
    """
    if state.elasticity is None:
        return []
    outputs: list[Output] = []
    for decision in state.elasticity.take_in(
        event, state.membership, state.past.membership_s(now_s)
    ):
        if isinstance(decision, Answer):
            outputs += [*announce_answer(decision), Show(world_size(state, ""))]
        elif isinstance(decision, Evict):
            outputs += _evict(state, decision, now_s)
    resized = state.elasticity.wanted_resize(state.membership)
    if resized is None or state.membership.finished:
        return outputs
    entry, *rest = commit(state, resized, now_s)
    return [*outputs, entry, *announce_size(state, resized.reason, now_s), *rest]


def _evict(state: PlaneState, decision: Evict, now_s: float) -> list[Output]:
    """Give up the workers of a node if they have not left in time.

    Return no outputs if the node has no worker, or the others cannot train on without it.
    """
    node, membership = decision.node, state.membership
    if not membership.workers_on(node) or not state.policies.may_evict(node, membership.keepers):
        return []
    return commit_loss(state, events.Evicted(node, decision.reason), now_s)
