"""The decisions of a control plane that follow from what is known, and from nothing else: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors import contact
from chaoskit.coordinator.membership import assignment, happenings, results, revival
from chaoskit.coordinator.membership.events import AnyEvent
from chaoskit.coordinator.membership.next_world import Candidates, next_world
from chaoskit.elastic.events import Event as Happening
from chaoskit.wire.messages import Snapshot


def leaving_at_once(
    hosts: Mapping[str, str], idle: Collection[str], crew: Collection[str]
) -> list[str]:
    """Workers that end now because their nodes are to idle: members leave at a step boundary.

    Args:
        hosts: live worker -> node.
        crew: the members, and those that leave at a step boundary that not all are known to have passed.
    """
    return [worker for worker, node in hosts.items() if node in idle and worker not in crew]


def may_evict(node: str, keepers: Set[str]) -> bool:
    """Whether the others can go on without ``node``. ``keepers``: nodes that have the state of the training."""
    return not keepers <= {node}


def overdue(
    started: Collection[str], ordered_s: Mapping[str, float], limit_s: float, now_s: float
) -> list[str]:
    """Return the workers of ``started`` that were ordered longer ago than ``limit_s``.

    Args:
        started: workers that were to start longer ago than ``limit_s``.
        ordered_s: worker -> when its node was told to start it, perhaps long after; without an entry it was long ago.
    """
    return [worker for worker in started if now_s - ordered_s.get(worker, -math.inf) > limit_s]


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What a control plane decides by.

    Attributes:
        next_world: which workers have a rank in the next generation.
        assign: which shards each of them computes.
        leaving_at_once: which workers end in the middle of a step when their nodes are to idle.
        restorable: which of the known copies a world can begin with, the newest first.
        may_give_up: whether a silent node may be given up.
        may_evict: whether a node that does not leave in time may be made to.
        overdue: which workers are not ready in time.
        compared: which workers must end with the same weights.
        happenings_of: what the elastic policy is told of an event.
    """

    next_world: Callable[[Candidates], list[str]] = next_world
    assign: Callable[
        [Mapping[str, tuple[int, ...]], Sequence[str], int, Mapping[str, int] | None],
        dict[str, tuple[int, ...]],
    ] = assignment.reassign
    leaving_at_once: Callable[[Mapping[str, str], Collection[str], Collection[str]], list[str]] = (
        leaving_at_once
    )
    restorable: Callable[[Sequence[Snapshot]], tuple[Snapshot, ...]] = revival.complete
    may_give_up: Callable[[bool, float, float], bool] = contact.may_give_up
    may_evict: Callable[[str, Set[str]], bool] = may_evict
    overdue: Callable[[Collection[str], Mapping[str, float], float, float], list[str]] = overdue
    compared: Callable[[RunConfig, Sequence[str]], Collection[str] | None] = results.compared
    happenings_of: Callable[[AnyEvent, Collection[str], Collection[str]], list[Happening]] = (
        happenings.happenings_of
    )


#: The policies of every real run; a simulated history replaces some to plant a mistake.
POLICIES = Policies()
