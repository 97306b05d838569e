"""Effects of the actions of a membership: messages to nodes and observers, lines of the journal.

-> coordinator/server.py carries them out; agent/agent.py obeys the messages.
coordinator/membership/regroup.py makes the plans; coordinator/schedules/start_order.py holds
starts.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.notes import note_of_end, note_of_plan, note_of_set_aside
from chaoskit.coordinator.outputs import End, Output, Send, Show, WriteRecord
from chaoskit.coordinator.results import Results
from chaoskit.coordinator.state import PlaneState
from chaoskit.elastic.decisions import Answer
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import (
    Answered,
    EndJob,
    Plan,
    Recall,
    StartWorker,
    StopWorker,
    WorldSize,
)


def effects_of(state: PlaneState, action: events.Action, now_s: float) -> list[Output]:
    """Return the outputs that carry out an action.

    These are orders to nodes, messages to observers and lines of the journal. The state of the
    plane follows, for example the schedule of starts.
    """
    match action:
        case events.Publish(plan):
            return publish_plan(state, state.reasons.explain(plan, state.membership.size), now_s)
        case events.OrderStart(node, worker):
            state.workers.node_of[worker] = node
            return start_workers(state, state.schedules.starts.submit(worker), now_s)
        case events.AskForCopies(node, number):
            outputs: list[Output] = [Send(node, Recall(number))]
            if (
                not state.membership.can_begin_with_copies
            ):  # no step is repeated without replacements
                outputs += start_workers(state, state.schedules.starts.release(), now_s)
            return outputs
        case events.OrderStop(worker, cause):
            return [stop_worker(state, worker, cause, now_s)]
        case events.SetAside(node):
            return [note_of_set_aside(node, state.config.strikes_max, now_s)]
        case events.FinishJob(ok, reason):
            return finish_job(state, ok, reason, now_s)


# -- workers ---------------------------------------------------------------------------------------


def start_workers(state: PlaneState, workers: Iterable[str], now_s: float) -> list[Output]:
    """Return the orders to nodes to start ``workers``, without those that are lost by now.

    The time that a worker has to become ready counts from ``now_s``.
    """
    alive = [worker for worker in workers if state.membership.host_of(worker) is not None]
    state.workers.ordered_s.update(dict.fromkeys(alive, now_s))
    return [Send(state.workers.node_of[worker], StartWorker(worker)) for worker in alive]


def stop_worker(state: PlaneState, worker: str, cause: str, now_s: float) -> Send:
    """Return the order to the node of a worker to end it, with the time that it may run on.

    For the cause "left", its progress is forgotten, and later observers receive the order.
    """
    stop = StopWorker(worker, cause, *_farewell(state, worker, cause, now_s))
    if cause == "left":
        state.facts.note(stop)
        state.detectors.watch.forget(worker)
    return Send(state.workers.node_of.get(worker, ""), stop)


def _farewell(state: PlaneState, worker: str, cause: str, now_s: float) -> tuple[float, str]:
    """Return for how many seconds a worker may run on, and the reason; 0 and "" to end at once.

    A healthy straggler and a worker of a leaving or evicted node may run on for a while.
    """
    if worker in state.workers.farewells:
        until_s, reason = state.workers.farewells[worker]
        return max(0.0, until_s - now_s), reason
    if cause in ("left", "evicted") and state.elasticity is not None:
        return state.elasticity.farewell(
            state.workers.node_of.get(worker, ""), state.past.membership_s(now_s)
        )
    return 0.0, ""


# -- plans and the end -----------------------------------------------------------------------------


def publish_plan(state: PlaneState, plan: Plan, now_s: float) -> list[Output]:
    """Return the outputs that publish a plan: its line of the journal comes first.

    The plan goes to observers and to all nodes with members or leavers, with an order to end after
    a step if there is one. The rendezvous of the generation is opened, and waits at the older one
    end. After a plan that aborts or has leavers, starts are held until the generation recovers.
    """
    state.forming.begin()
    if plan.abort or plan.leavers:
        state.schedules.starts.recover(plan.generation, len(plan.members), now_s)
    if state.config.job.sharded:
        state.ending.results = Results()  # the last steps are taken again
    hosts = [
        *(member.node for member in plan.members),
        *(state.workers.node_of[worker] for worker in plan.leavers),
    ]
    nodes = list(dict.fromkeys(hosts))
    return [
        note_of_plan(plan, now_s),  # before it is sent: this process may end at any moment
        *state.board.begin(plan.generation, len(plan.members)),
        *(Send(node, plan) for node in nodes),
        *order_halt(state, nodes),
        Show(plan),
    ]


def order_halt(state: PlaneState, nodes: Iterable[str]) -> list[Output]:
    """Return the orders to ``nodes`` to end their ranks; none while the job is not to end.

    The order is repeated for each plan, because workers that join have not received it.
    """
    halt = state.ending.halt
    return [] if halt is None else [Send(node, halt) for node in nodes]


def finish_job(state: PlaneState, ok: bool, reason: str, now_s: float) -> list[Output]:
    """Mark the job as ended, and return the outputs that report the end to nodes and observers.

    Return no outputs if the job has ended before.
    """
    if state.ending.end is not None:
        return []
    state.ending.end = EndJob(ok, reason)
    attendance = state.nodes.attendance
    nodes = tuple(sorted({*attendance.met, *state.workers.node_of.values()}))
    sends = [Send(node, state.ending.end) for node in sorted(attendance.attached)]
    return [note_of_end(ok, reason, now_s), Show(EndJob(ok, reason, nodes)), *sends, End()]


# -- size ------------------------------------------------------------------------------------------


def world_size(state: PlaneState, reason: str) -> WorldSize:
    """Return the message to observers about the size of the world and the nodes in use.

    Args:
        reason: the reason of the last resize; "" if the message reports none.
    """
    membership, elasticity = state.membership, state.elasticity
    nodes = tuple(node for node in membership.nodes if node not in membership.idle)
    requested = elasticity.requested_size if elasticity is not None else 0
    return WorldSize(membership.size, requested, nodes, reason)


def announce_size(state: PlaneState, reason: str, now_s: float) -> list[Output]:
    """Return the line of the journal and the message to observers about a resized world."""
    size = world_size(state, reason)
    return [WriteRecord(Event.RESIZED, msgspec.structs.asdict(size), int(now_s * 1e9)), Show(size)]


def announce_answer(answer: Answer) -> list[Output]:
    """Return the line of the journal and the message to observers with the answer to a request."""
    answered = Answered(answer.request, answer.accepted, answer.reason, answer.nodes)
    return [WriteRecord(Event.ASKED, msgspec.structs.asdict(answered)), Show(answered)]
