"""What was lost, and how that shows: workers, nodes, the record itself. Pure functions of the membership."""

from __future__ import annotations

from chaoskit.coordinator.membership import events
from chaoskit.coordinator.membership.membership import Membership
from chaoskit.wire.messages import AgentHello, WorkerLost


def lost_workers(
    event: events.AnyEvent, membership: Membership, now_s: float
) -> list[tuple[WorkerLost, int | None]]:
    """Whom ``event``, which ``membership`` has yet to take in, takes away: each with its rank, if it had one."""
    lost: list[WorkerLost] = []
    match event:
        case events.WorkerLost(worker, cause, detail, detected_ns) if (
            host := membership.host_of(worker)
        ) is not None:
            lost = [WorkerLost(worker, host, cause, detail, detected_ns, event.trained_in)]
        case events.NodeLost(node, detail):
            workers = sorted(membership.workers_on(node))
            lost = [
                WorkerLost(worker, node, "node lost", detail, int(now_s * 1e9))
                for worker in workers
            ]
        case events.Evicted(node, detail):
            workers = sorted(membership.workers_on(node))
            lost = [
                WorkerLost(worker, node, "evicted", detail, int(now_s * 1e9)) for worker in workers
            ]
        case events.Unfit(node, detail):
            workers = sorted(membership.workers_on(node))
            lost = [
                WorkerLost(worker, node, "unfit", detail, int(now_s * 1e9)) for worker in workers
            ]
        case events.LeftOut(nodes, detail):
            places = [
                (worker, node) for node in nodes for worker in sorted(membership.workers_on(node))
            ]
            lost = [
                WorkerLost(worker, node, "unreachable", detail, int(now_s * 1e9))
                for worker, node in places
            ]
    return [(one, _rank_of(one.worker, membership)) for one in lost]


def _rank_of(worker: str, membership: Membership) -> int | None:
    member = membership.plan.member(worker) if membership.plan is not None else None
    return member.rank if member is not None else None


def news(hello: AgentHello, membership: Membership, term: int) -> str:
    """What a node knows that the record, which is of ``term``, does not; in words, "" if that is nothing."""
    known, started = membership.newest_known, membership.started_on(hello.node)
    if hello.generation > known:
        return f"it has seen generation {hello.generation}, the record tells of {known}"
    if started is not None and hello.started > started:
        return f"it has started {hello.started} workers, the record tells of {started}"
    return (
        f"it has seen term {hello.term}, the record tells of {term - 1}"
        if hello.term > term
        else ""
    )


def difference(mine: str, expected: str) -> str:
    """Where two fingerprints differ, in words."""
    pairs = zip(mine.split(", "), expected.split(", "), strict=False)
    return "; ".join(f"{one} instead of {other}" for one, other in pairs if one != other)
