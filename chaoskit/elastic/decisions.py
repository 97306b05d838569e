"""Decisions on the size and the nodes of a world, as the elastic policy returns them.

-> elastic/policy.py makes them; coordinator/commit.py and coordinator/membership/elasticity.py
carry them out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Leave:
    """Decision that a node shall leave, and be out at the time ``by_s``; else it is evicted."""

    node: str
    by_s: float


@dataclass(frozen=True, slots=True)
class ResizeWorld:
    """Decision on another world.

    Attributes:
        size: number of nodes of the world; 0 to wait for enough nodes.
        members: its nodes, fewer than ``size`` while a replacement of a lost node is awaited.
        joins: the members that were no members before.
        leaves: the nodes that are to leave, each with its time.
        reason: the reason, as a sentence.
        swap_by_s: time until which leavers may stay for the nodes that join in their place; None if
            no node replaces another. The world then moves once.
    """

    size: int
    members: tuple[str, ...]
    joins: tuple[str, ...]
    leaves: tuple[Leave, ...]
    reason: str
    swap_by_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Decision to end the workers of a node that has not left in time.

    The workers may run until ``by_s`` for their own preparations.
    """

    node: str
    reason: str
    by_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Immediate answer to a request for another size, or for nodes.

    Attributes:
        request: unique name of the request; "" for a request that has none.
        accepted: the request is carried out, at once or when there are nodes.
        reason: the reason, in words, also of an accepted request.
        nodes: nodes that the job of higher priority may have, once they have left.
    """

    request: str
    accepted: bool
    reason: str
    nodes: tuple[str, ...] = ()


Decision = ResizeWorld | Evict | Answer
