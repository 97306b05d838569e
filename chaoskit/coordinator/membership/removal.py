"""Removal of workers: a lost worker, all workers of a node, or workers on idle nodes.

-> coordinator/membership/worker_placement.py: the node of a replacement;
coordinator/membership/failure_budget.py: which losses count. coordinator/effects.py turns the
orders into messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from chaoskit.coordinator.membership.events import Action, OrderStop
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.coordinator.membership.trained import assume_trained
from chaoskit.coordinator.membership.worker_placement import start_missing


def remove_workers(
    membership: Membership, workers: Iterable[str], cause: str, now_s: float
) -> list[Action]:
    """Remove live workers. Return the orders to stop them and to start others in their place.

    Args:
        cause: the cause in the orders to stop them, such as "lost"; "left" if they leave in order.
    """
    lost_on, stops = [], list[Action]()
    for worker in workers:
        node = membership.workers.remove(worker)
        _note_lost_copy(membership, worker, node, now_s)
        membership.training.remove(worker)
        lost_on.append(node)
        stops.append(OrderStop(worker, cause))
    return [*stops, *start_missing(membership, lost_on, now_s)]


def _note_lost_copy(membership: Membership, worker: str, node: str, now_s: float) -> None:
    """Mark answers about copies as out of date if ``worker`` was a member.

    It may have left a newer copy on ``node``.
    """
    if membership.plan is None or membership.plan.member(worker) is None:
        return
    if membership.is_sharded:
        membership.search.lose_member(now_s)
    else:
        membership.search.forget_answer(node)


def remove_nodes(
    membership: Membership, nodes: Collection[str], cause: str, now_s: float, *, met: bool = True
) -> list[Action]:
    """Remove all workers of ``nodes``, and return the orders of :func:`remove_workers`.

    Args:
        cause: as for :func:`remove_workers`.
        met: the workers may have trained in their generation, and cannot report it any more.
    """
    workers = membership.workers.on(nodes)
    if met:
        assume_trained(membership, workers)
    return remove_workers(membership, workers, cause, now_s)


def vacate(membership: Membership, now_s: float) -> list[Action]:
    """Remove workers without a rank from nodes that are to idle, and return the orders that follow.

    Members leave at a step boundary. Those of a sharded job are removed at once, because the state
    is restored from copies anyway.
    """
    target, crew = membership.target, set(membership.crew)
    leaving_workers = membership.policies.leaving_at_once(
        membership.workers.hosts, target.idle, crew
    )
    if membership.is_sharded:
        leaving_workers = [*leaving_workers, *membership.departing]
        assume_trained(membership, leaving_workers)
    return remove_workers(membership, leaving_workers, "left", now_s)
