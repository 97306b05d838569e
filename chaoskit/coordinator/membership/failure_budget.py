"""The failure budget of a run: the losses of workers that spend it, and pauses of failed starts.

A run fails when more than ``max_failures`` workers were lost, or after :data:`STARTS_MAX` failed
starts in a row with too few ranks left.

-> coordinator/membership/decide.py: the decision that a spent budget ends the job;
coordinator/membership/strikes.py: nodes that are set aside;
coordinator/membership/worker_placement.py: the wait for the end of a pause.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from chaoskit.coordinator.membership.events import Action, SetAside
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.vocabulary import SUSPECTED_CAUSES

#: Failed starts in a row that end the job when too few ranks are left.
STARTS_MAX = 8
#: Pause before the next start when two workers in a row did not become ready. It doubles with each
#: further one, up to PAUSE_MAX_S.
PAUSE_S = 0.25
PAUSE_MAX_S = 30.0


def strike(membership: Membership, node: str, now_s: float) -> list[Action]:
    """Count the loss of a worker against its node.

    Return one :class:`SetAside` if this loss sets the node aside, else an empty list.
    """
    return [SetAside(node)] if membership.known_nodes.strikes.strike(node, now_s) else []


def count_lost_worker(membership: Membership, worker: str, cause: str, now_s: float) -> None:
    """Count the loss of a worker against the failure budget, or as a failed start.

    A worker spends the budget if it was ready, or if no rank has trained yet. Once ranks have
    trained, a loss on suspicion (hung or slow) is not counted. Every other worker is a failed
    start: the second one in a row and each later one delay the next start. The function only
    counts; ``decide.py`` decides.

    Args:
        cause: a cause of :class:`~chaoskit.wire.messages.WorkerLost`.
    """
    failures = membership.failures
    if _spends_budget(membership, worker):
        failures.losses += not (membership.training.begun and cause in SUSPECTED_CAUSES)
        return
    failures.failed_starts += 1
    if failures.failed_starts > 1:
        failures.start_after_s = now_s + min(
            PAUSE_MAX_S, PAUSE_S * 2.0 ** (failures.failed_starts - 2)
        )


def count_lost_nodes(membership: Membership, nodes: Collection[str], now_s: float) -> None:
    """Count the workers of lost nodes against the failure budget, before they are removed.

    A start that was decided at this very moment was not ordered yet, and spends nothing: of two
    nodes that are lost together, the first has workers started on the second. No failed starts are
    counted here.
    """
    begun_s = membership.workers.begun_s
    ordered = [
        worker for worker in membership.workers.on(nodes) if begun_s.get(worker, -math.inf) < now_s
    ]
    membership.failures.losses += sum(_spends_budget(membership, worker) for worker in ordered)


def _spends_budget(membership: Membership, worker: str) -> bool:
    """Return whether the loss of a worker counts: it was ready, or no rank has trained yet."""
    return membership.is_ready(worker) or not membership.training.begun
