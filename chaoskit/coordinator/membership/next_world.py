"""The workers that have a rank in the next generation: a pure function of what a membership knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from chaoskit.coordinator.membership.assignment import seat


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The workers that could have a rank, and what speaks for and against them.

    Attributes:
        abort: the last generation is broken off; else it goes on until a step boundary.
        seats: worker and node of every rank of the generation that last worked.
        hosts: live worker -> node.
        crew: the members, and those that leave at a step boundary that not all are known to have passed.
        departing: of the crew, those that are not wanted any more.
        holders: workers that have the state of the training.
        spares: ready workers without a rank -> node, but for nodes that are to idle.
        starting: nodes on which a worker is being started, but for those that are to idle.
        trusted: nodes that are not set aside.
        size: ranks that the world shall have.
        size_max: ranks that it may have for a moment, while some are still needed that are to go.
        spread: where no rank was lost, a spare on a node that has a rank waits while others suffice or start.
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


def next_world(known: Candidates) -> list[str]:
    """Return the workers of the next membership, by rank.

    After a loss, departing workers take part once more, since one of them may have the newest step. Otherwise one of
    them stays if no other worker has the state, until another one has taken it over.
    """
    kept = [worker for worker in known.crew if worker not in known.departing]
    needed: Sequence[str] = ()
    if known.abort:
        kept, needed = [*known.crew], known.departing
    elif known.holders.isdisjoint(kept):
        needed = [worker for worker in known.departing if worker in known.holders][:1]
        kept += needed
    room = min(known.size + len(needed), known.size_max) - len(kept)
    spares = willing(known.spares, known.trusted, room)
    if known.spread and not known.abort:
        spares = _on_other_nodes(
            spares, {known.hosts[worker] for worker in kept}, known.starting, room
        )
    members = {worker: known.hosts[worker] for worker in kept}
    return seat(known.seats, members, spares, len(kept) + max(0, room))


def willing(spares: Mapping[str, str], trusted: Collection[str], wanted: int) -> Mapping[str, str]:
    """Return spare -> its node, with those on nodes that are set aside only if the others are too few.

    Args:
        wanted: how many; 0 or less for none.
    """
    good = {worker: node for worker, node in spares.items() if node in trusted}
    return good if len(good) >= wanted else spares


def _on_other_nodes(
    spares: Mapping[str, str], taken: Set[str], starting: Set[str], wanted: int
) -> Mapping[str, str]:
    """Return the spares on nodes without a rank; all spares if these are too few and no other node starts a worker."""
    others = {worker: node for worker, node in spares.items() if node not in taken}
    return others if starting - taken or len(others) >= wanted else spares
