"""A worker is lost: its process ended, its numbers are corrupt, or it is given up.

1. An agent reports the end of a process (:func:`worker_lost`), or ranks accuse a worker with
   corrupt numbers (:func:`accused`). A worker that a detector gives up (:func:`give_up`) is first
   ordered to end.
2. :func:`lose_worker` announces the loss and commits it. ``membership/apply.py`` counts the loss,
   removes the worker and orders the start of another one; ``membership/decide.py`` finds that a
   rank is missing. ``membership/regroup.py`` plans the next world: ``next_world.py`` chooses its
   workers, ``assignment.py`` their ranks and shards.
3. ``commit.py`` returns the event for the log, and the effects: the new plan goes to all nodes with
   members, and the start is held until each rank has committed (``schedules/start_order.py``).
   ``server.py`` writes the log first.

-> agent/agent.py notices the end of a process; coordinator/detectors/hang.py and stragglers.py give
workers up; coordinator/handlers/on_node.py: a whole node is lost. Ranks that survive:
runtime/group/regroup.py.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit, commit_loss
from chaoskit.coordinator.effects import stop_worker
from chaoskit.coordinator.handlers.on_generation import note_trained
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, Send, Show
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import CORRUPT
from chaoskit.wire.messages import Accuse, StopWorker, Suspicion, WorkerLost


def worker_lost(state: PlaneState, message: WorkerLost, now_s: float) -> list[Output]:
    """Commit the end of a worker's process, as its agent reports it.

    A loss that the log has already is answered by an order to stop the worker, which ends the
    repetition of the report. A loss that follows from the failure of the job is ignored. The step
    that the worker committed last may settle its generation. A leaver that is removed then is no
    loss.
    """
    worker, cause = message.worker, message.cause
    if state.ending.end is not None and not state.ending.end.ok:
        return []  # the loss follows from the failure that ended the job
    if state.membership.host_of(worker) is None:  # the answer ends the repetition of the report
        return [Send(message.node, StopWorker(worker, cause))]
    state.workers.ended.add(worker)
    outputs = note_trained(state, message.trained_in, now_s)
    if state.membership.host_of(worker) is None:  # a leaver goes when its generation settles
        state.workers.ended.discard(worker)
        return outputs
    return outputs + lose_worker(state, message, now_s)


def accused(state: PlaneState, message: Accuse, now_s: float) -> list[Output]:
    """Give up the ranks that are named as the source of wrong numbers.

    Accused workers that have no rank any more are not given up. Copies of workers with corrupt
    numbers are never taken, also if the worker is lost already. Every rank sends the same
    accusation; each has its effect once.
    """
    outputs: list[Output] = []
    newly_accused = tuple(
        worker for worker in message.accused if not state.membership.is_convicted(worker)
    )
    if message.cause == CORRUPT and newly_accused:
        outputs += commit(state, events.Convicted(newly_accused), now_s)
    for worker in message.accused:
        if worker in state.membership.members:
            outputs += give_up(state, worker, message.cause, message.detail, now_s)
    return [*outputs, Show(message)]


def give_up(
    state: PlaneState,
    worker: str,
    cause: str,
    detail: str,
    now_s: float,
    *,
    aside: bool = False,
    suspicion: Suspicion | None = None,
) -> list[Output]:
    """Order a live worker to end, and commit its loss at once.

    Args:
        cause: a cause of :class:`~chaoskit.wire.messages.WorkerLost`.
        aside: its node gets no more workers, if there is another node.
        suspicion: the phase in which it hung, where it may have been healthy; None for other
            causes.
    """
    node = state.workers.node_of.get(worker, "")
    loss = WorkerLost(
        worker, node, cause, detail, int(now_s * 1e9), aside=aside, suspicion=suspicion
    )
    return [stop_worker(state, worker, cause, now_s), *lose_worker(state, loss, now_s)]


def lose_worker(state: PlaneState, loss: WorkerLost, now_s: float) -> list[Output]:
    """Announce and commit the loss of a worker, and forget its progress."""
    state.workers.ended.discard(loss.worker)
    state.detectors.watch.forget(loss.worker)
    return commit_loss(state, loss, now_s)
