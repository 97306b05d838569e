"""The end of a job: ranks that are done, scripts that fail, orders to end, the last snapshot.

-> coordinator/membership/decide.py decides that the job is over; coordinator/effects.py reports it.
runtime/step/halting.py: how a rank ends after a step; daemon/saving.py: the last snapshot.
launcher/notice.py: the signals that end a launch.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.effects import order_halt
from chaoskit.coordinator.handlers.on_generation import is_out_of_date
from chaoskit.coordinator.membership import events
from chaoskit.coordinator.outputs import Output, Send, Show
from chaoskit.coordinator.schedules.save_schedule import halting_step
from chaoskit.coordinator.state import PlaneState
from chaoskit.wire.messages import EndJob, Halt, StoreStep, WorkerDone, WorkerFailed


def worker_done(state: PlaneState, message: WorkerDone, now_s: float) -> list[Output]:
    """Commit that a rank has taken the last step. The job fails if final weights differ.

    A report of an earlier generation of a sharded job is only shown to observers.
    """
    shown, membership = [Show(message)], state.membership
    if is_out_of_date(state, message.generation):
        return [*shown]
    counted_workers = state.policies.compared(state.config, membership.members)
    problem = state.ending.results.note(message.worker, message.weights_digest, counted_workers)
    if problem:
        return [*commit(state, events.RunFailed(problem), now_s), *shown]
    return [*commit(state, message, now_s), *shown]


def worker_failed(state: PlaneState, message: WorkerFailed, now_s: float) -> list[Output]:
    """Fail the job for an exception of the script that would be raised on every rank.

    Such an exception is fatal by itself, or comes from more workers than the run has nodes without
    a step in between. Return no outputs for another exception, and for a worker that training
    continues without: the agent reports its loss.
    """
    worker, error, step = message.worker, message.error, state.detectors.watch.committed
    is_fatal = message.fatal or state.detectors.errors.note(error, step, worker)
    if not is_fatal or state.membership.trains_on_without(worker):
        return []
    state.facts.note(message)
    return [Show(message), *commit(state, events.RunFailed(error), now_s)]


def end_job(state: PlaneState, message: EndJob, now_s: float) -> list[Output]:
    """Fail the job at once, with the reason of the observer that asks for it."""
    return commit(state, events.RunFailed(message.reason), now_s)


def halt_job(state: PlaneState, message: Halt, now_s: float) -> list[Output]:
    """Order all nodes to end their ranks after the same step. A job without ranks fails at once.

    The first order picks the step; a repeated one sends the same step again.
    """
    shown, watch = [Show(message)], state.detectors.watch
    if not state.membership.world:
        return [*shown, *commit(state, events.RunFailed(message.reason_without_ranks), now_s)]
    if state.ending.halt is None:
        step = halting_step(watch.committed, watch.step_s, state.config.heartbeat_ms / 1000)
        state.ending.halt = Halt(message.reason, step)
    return [*shown, *order_halt(state, sorted(state.membership.nodes))]


def dismiss_behind(state: PlaneState, now_s: float) -> list[Output]:
    """Remove the leavers that wait for a group at the end of the job: the others build none."""
    watch = state.detectors.watch
    workers_behind = [
        worker for worker in state.membership.leavers_at_end if watch.regroups(worker)
    ]
    return [
        output
        for worker in workers_behind
        for output in commit(state, events.Behind(worker), now_s)
    ]


def store_by_time(state: PlaneState, now_s: float) -> list[Output]:
    """Order all nodes to store the state after the step that is due by time, if one is due."""
    step = state.schedules.saves.due(now_s)
    return (
        []
        if step is None
        else [Send(node, StoreStep(step)) for node in sorted(state.membership.nodes)]
    )


def store_before_end(state: PlaneState, now_s: float) -> list[Output]:
    """Order all nodes to store the newest committed state, if the step before a halt lasts long.

    That step may never end. Each state is ordered once.
    """
    step, ending = state.detectors.watch.committed, state.ending
    is_due = ending.halt is not None and ending.patience.is_over(step, now_s)
    if not is_due or step <= ending.stored_step:
        return []
    ending.stored_step = step
    return [Send(node, StoreStep(step)) for node in sorted(state.membership.nodes)]
