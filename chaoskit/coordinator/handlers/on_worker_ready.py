"""A started worker is ready, and may take a rank; or it is not ready in time.

-> coordinator/membership/decide.py and next_world.py: whether it gets a rank, and when.
runtime/worker/fingerprint.py: the facts on which its numbers depend. A member that does not follow
a plan: coordinator/detectors/join_timeout.py.
"""

from __future__ import annotations

from chaoskit.coordinator.commit import commit
from chaoskit.coordinator.handlers.on_worker_lost import give_up
from chaoskit.coordinator.losses import difference
from chaoskit.coordinator.outputs import Output, Show, WriteRecord
from chaoskit.coordinator.state import PlaneState
from chaoskit.vocabulary import HUNG, Event
from chaoskit.wire.messages import WorkerReady


def worker_ready(state: PlaneState, message: WorkerReady, now_s: float) -> list[Output]:
    """Commit that a worker can take a rank.

    It is given up if its fingerprint differs from the other workers': its numbers would differ.
    """
    membership, worker = state.membership, message.worker
    shown = [Show(message)]  # ahead of the plan that it makes possible
    was_ready, fingerprint = membership.is_ready(worker), membership.fingerprint
    if (
        fingerprint
        and message.fingerprint != fingerprint
        and membership.host_of(worker) is not None
    ):
        detail = difference(message.fingerprint, fingerprint)
        return [*shown, *give_up(state, worker, "differs", detail, now_s)]
    outputs = [*shown, *commit(state, message, now_s)]
    if not was_ready and worker in membership.spares:
        outputs.append(WriteRecord(Event.SPARE_READY, {"worker": worker}))
    return outputs


def give_up_late(state: PlaneState, now_s: float) -> list[Output]:
    """Give up workers that are not ready within ``startup_s`` after the order to start them.

    Workers on nodes that are not in steady contact are kept: they may be ready.
    """
    outputs: list[Output] = []
    membership, startup_s = state.membership, state.config.startup_s
    held = state.schedules.starts.held
    started = [
        worker
        for worker in membership.overdue(state.past.membership_s(now_s))
        if worker not in held
    ]
    for worker in state.policies.overdue(started, state.workers.ordered_s, startup_s, now_s):
        if not state.detectors.contact.is_steady(state.workers.node_of[worker], now_s):
            continue
        outputs += give_up(state, worker, HUNG, f"not ready within startup_s={startup_s:g}", now_s)
    return outputs
