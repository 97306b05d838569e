"""Choice of the workers that have a rank in the next generation: a pure function.

-> coordinator/membership/assignment.py: the rank of each; coordinator/membership/regroup.py makes
the plan for them. elastic/policy.py: the size and the nodes of a world that grows and shrinks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from chaoskit.coordinator.membership.assignment import seat


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The workers that could have a rank, and the facts that decide which of them have one.

    Attributes:
        abort: the last generation is broken off; else it continues until a step boundary.
        seats: worker and node of every rank of the generation that last worked.
        hosts: live worker -> node.
        crew: the members, and those that leave at a step boundary that not all are known to have
            passed.
        departing: workers of the crew that are to be removed.
        holders: workers that have the state of the training.
        spares: ready worker without a rank -> node, except on nodes that are to idle.
        starting: nodes on which a worker is being started, except those that are to idle.
        trusted: nodes that are not set aside.
        size: number of ranks that is wanted.
        size_max: most ranks for a moment, while departing workers are still needed.
        spread: if no rank was lost, a spare on a node that has a rank waits as long as spares on
            other nodes suffice or start.
    """

    abort: bool
    seats: Sequence[tuple[str, str]]
    hosts: Mapping[str, str]
    crew: Sequence[str]
    departing: Sequence[str]
    holders: Set[str]
    spares: Mapping[str, str]
    starting: Set[str]
    trusted: Collection[str]
    size: int
    size_max: int
    spread: bool


def next_world(candidates: Candidates) -> list[str]:
    """Return the workers of the next generation, by rank.

    After a loss, departing workers take part once more, since one of them may have the newest step.
    Otherwise a departing worker stays if no other worker has the state, until another one has taken
    it over.
    """
    kept = [worker for worker in candidates.crew if worker not in candidates.departing]
    needed: Sequence[str] = ()
    if candidates.abort:
        kept, needed = [*candidates.crew], candidates.departing
    elif candidates.holders.isdisjoint(kept):
        needed = [worker for worker in candidates.departing if worker in candidates.holders][:1]
        kept += needed
    room = min(candidates.size + len(needed), candidates.size_max) - len(kept)
    spares = prefer_trusted(candidates.spares, candidates.trusted, room)
    if candidates.spread and not candidates.abort:
        spares = _on_other_nodes(
            spares, {candidates.hosts[worker] for worker in kept}, candidates.starting, room
        )
    members = {worker: candidates.hosts[worker] for worker in kept}
    return seat(candidates.seats, members, spares, len(kept) + max(0, room))


def prefer_trusted(
    spares: Mapping[str, str], trusted: Collection[str], wanted: int
) -> Mapping[str, str]:
    """Return spare -> node; spares on nodes that are set aside only if the others are too few.

    Args:
        wanted: how many spares are needed; 0 or less for none.
    """
    trusted_spares = {worker: node for worker, node in spares.items() if node in trusted}
    return trusted_spares if len(trusted_spares) >= wanted else spares


def _on_other_nodes(
    spares: Mapping[str, str], taken: Set[str], starting: Set[str], wanted: int
) -> Mapping[str, str]:
    """Return the spares on nodes without a rank.

    All spares are returned if these are too few, and no node without a rank starts a worker.
    """
    others = {worker: node for worker, node in spares.items() if node not in taken}
    return others if starting - taken or len(others) >= wanted else spares
