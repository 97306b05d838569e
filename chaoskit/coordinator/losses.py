"""Losses that an event or a hello shows: of workers, and of entries of the log.

Pure functions of the membership.

-> coordinator/commit.py announces the losses; coordinator/membership/apply.py counts them.
coordinator/handlers/on_node.py: what follows when the log has lost entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.wire.messages import AgentHello, NodeLost, WorkerLost


class LostWorker(NamedTuple):
    """A worker that an event takes away.

    Attributes:
        message: the loss, for observers.
        rank: the rank of the worker; None for a worker without one.
    """

    message: WorkerLost
    rank: int | None


def lost_workers(
    event: events.MembershipEvent, membership: Membership, now_s: float
) -> list[LostWorker]:
    """Return the workers that are lost by ``event``, before ``membership`` takes it in.

    Empty for an event without losses, and for a worker that is lost already. Workers that leave a
    resized world are no losses.
    """
    match event:
        case WorkerLost(worker):
            host = membership.host_of(worker)
            losses = [] if host is None else [msgspec.structs.replace(event, node=host)]
        case NodeLost(node, detail):
            losses = _all_workers(membership, [node], "node lost", detail, now_s)
        case events.Evicted(node, detail):
            losses = _all_workers(membership, [node], "evicted", detail, now_s)
        case events.Unfit(node, detail):
            losses = _all_workers(membership, [node], "unfit", detail, now_s)
        case events.LeftOut(nodes, detail):
            losses = _all_workers(membership, nodes, "unreachable", detail, now_s)
        case _:
            return []
    return [LostWorker(loss, _rank_of(loss.worker, membership)) for loss in losses]


def _all_workers(
    membership: Membership, nodes: Sequence[str], cause: str, detail: str, now_s: float
) -> list[WorkerLost]:
    """Return the loss of each worker of ``nodes``."""
    places = [(worker, node) for node in nodes for worker in sorted(membership.workers_on(node))]
    return [WorkerLost(worker, node, cause, detail, int(now_s * 1e9)) for worker, node in places]


def _rank_of(worker: str, membership: Membership) -> int | None:
    member = membership.plan.member(worker) if membership.plan is not None else None
    return member.rank if member is not None else None


def fact_missing_in_log(hello: AgentHello, membership: Membership, term: int) -> str:
    """Return the first fact that a node knows and the log of ``term`` lacks, in words; "" if none.

    Such a fact shows that the log has lost entries.
    """
    newest, started = membership.newest_known, membership.started_on(hello.node)
    if hello.generation > newest:
        return f"it has seen generation {hello.generation}, the log has {newest}"
    if started is not None and hello.started > started:
        return f"it has started {hello.started} workers, the log has {started}"
    return f"it has seen term {hello.term}, the log has {term - 1}" if hello.term > term else ""


def difference(actual: str, expected: str) -> str:
    """Return the parts in which two fingerprints differ, in words; "" if they are equal.

    Parts are compared by their place; those that only the longer fingerprint has are left out.
    """
    pairs = zip(actual.split(", "), expected.split(", "), strict=False)
    return "; ".join(f"{part} instead of {other}" for part, other in pairs if part != other)
