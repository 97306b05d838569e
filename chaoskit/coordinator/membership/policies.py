"""Replaceable decisions of a control plane: evictions, late starts, the next world. Pure functions.

-> coordinator/membership/next_world.py, coordinator/membership/assignment.py,
coordinator/membership/copy_search.py and elastic/policy.py have the longer ones.
coordinator/detectors/contact.py asks whether a node may be given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership import assignment, copy_search
from chaoskit.coordinator.membership.next_world import Candidates, next_world
from chaoskit.elastic.policy import PolicyWorld
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.wire.messages import OfferedSnapshot


def leaving_at_once(
    hosts: Mapping[str, str], idle: Collection[str], crew: Collection[str]
) -> list[str]:
    """Return the workers that end now because their nodes are to idle.

    Members leave at a step boundary, so they are not among them.

    Args:
        hosts: live worker -> node.
        idle: nodes that are to have no workers.
        crew: the members, and those that leave at a step boundary that not all are known to have
            passed.
    """
    return [worker for worker, node in hosts.items() if node in idle and worker not in crew]


def may_give_up(has_contact: bool, lease_end_s: float, now_s: float) -> bool:
    """Return whether a silent node may be given up: at once, or when its own lease is over.

    Args:
        has_contact: the others can commit nothing that it takes part in, and this coordinator is
            not cut off from them.
        lease_end_s: when its own lease runs out, and its workers end by themselves.
    """
    return has_contact or now_s > lease_end_s


def may_evict(node: str, keepers: Set[str]) -> bool:
    """Return whether another node than ``node`` has the state of the training.

    Without any keepers, return False.

    Args:
        keepers: nodes that have the state of the training.
    """
    return not keepers <= {node}


def overdue(
    started: Collection[str], ordered_s: Mapping[str, float], limit_s: float, now_s: float
) -> list[str]:
    """Return the workers of ``started`` that were ordered longer ago than ``limit_s``.

    Args:
        started: workers with a start that was decided longer ago than ``limit_s``.
        ordered_s: worker -> when its node was ordered to start it, perhaps long after. A worker
            without an order here counts as ordered long ago.
        limit_s: time to become ready, in seconds.
    """
    return [worker for worker in started if now_s - ordered_s.get(worker, -math.inf) > limit_s]


def compared(config: RunConfig, members: Sequence[str]) -> Collection[str] | None:
    """Return the workers that must end with the same weights; None for all workers that ever ended.

    If the batch follows the world, only the members count. A worker that has left took its last
    steps with another batch.
    """
    return members if config.follow is not None else None


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The decisions of a control plane that follow from their arguments alone, one function each.

    Attributes:
        next_world: returns the workers that have a rank in the next generation, by rank.
        assign: returns worker -> the shards that it computes.
        leaving_at_once: returns the workers that end in the middle of a step when their nodes are
            to idle.
        restorable: returns the copies that a world can begin with, the newest first.
        may_give_up: returns True if a silent node may be given up.
        may_evict: returns True if a node that does not leave in time may be made to.
        overdue: returns the workers that are not ready in time.
        compared: returns the workers that must end with the same weights; None for all.
        elastic_world: makes the size and the nodes of the world under an elastic policy.
    """

    next_world: Callable[[Candidates], list[str]] = next_world
    assign: Callable[
        [Mapping[str, tuple[int, ...]], Sequence[str], int, Mapping[str, int] | None],
        dict[str, tuple[int, ...]],
    ] = assignment.reassign
    leaving_at_once: Callable[[Mapping[str, str], Collection[str], Collection[str]], list[str]] = (
        leaving_at_once
    )
    restorable: Callable[[Sequence[OfferedSnapshot]], tuple[OfferedSnapshot, ...]] = (
        copy_search.complete_snapshots
    )
    may_give_up: Callable[[bool, float, float], bool] = may_give_up
    may_evict: Callable[[str, Set[str]], bool] = may_evict
    overdue: Callable[[Collection[str], Mapping[str, float], float, float], list[str]] = overdue
    compared: Callable[[RunConfig, Sequence[str]], Collection[str] | None] = compared
    elastic_world: Callable[[ElasticPolicy, Iterable[str]], PolicyWorld] = PolicyWorld


#: The policies of every real run; a simulated history replaces some to plant a mistake.
POLICIES = Policies()
