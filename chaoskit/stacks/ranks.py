"""Ranks of the processes of a command, as launchers tell them to their children by variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaoskit.process.linux import is_ending, parent, variables
from chaoskit.substrate.core.launched_ranks import rank_of, strength
from chaoskit.substrate.core.processes import Process


@dataclass(frozen=True, slots=True)
class Seat:
    """The process that has a rank. ``variable``: the one that tells it; "" where none does."""

    rank: int
    node: str
    process: Process
    variable: str


def seats(nodes: Mapping[str, Sequence[Process]]) -> dict[int, Seat]:
    """Rank -> process, of the live processes of all nodes, those of each node from the first one down.

    The strongest variable that any process has decides. Where none has one, the first process of node n is rank n.
    """
    launched: list[Seat] = []
    for node, processes in nodes.items():
        ranks = {process.pid: rank_of(variables(process.pid)) for process in processes}
        for process in processes:
            rank = ranks[process.pid]
            # what a rank starts, such as loaders of data, inherits its environment
            if (
                rank is not None
                and ranks.get(parent(process.pid) or 0) != rank
                and not is_ending(process.pid)
            ):
                launched.append(Seat(rank.rank, node, process, rank.variable))
    if launched:
        strongest = min((seat.variable for seat in launched), key=strength)
        by_rank: dict[int, list[Seat]] = {}
        for seat in launched:
            if seat.variable == strongest:
                by_rank.setdefault(seat.rank, []).append(seat)
        return {rank: _youngest(seats) for rank, seats in sorted(by_rank.items())}
    first = {
        number: (node, processes[0])
        for number, (node, processes) in enumerate(nodes.items())
        if processes
    }
    return {
        number: Seat(number, node, process, variable="")
        for number, (node, process) in first.items()
    }


def _youngest(found: Iterable[Seat]) -> Seat:
    """Of several attempts of one rank, the newest."""
    return max(found, key=lambda seat: seat.process.ticks or 0)
