"""The process of each rank of a command.

-> ``substrate/core/launched_ranks.py``: how the environment of a process shows its rank.
``experiment/injection/ranks_found.py``: how the journal confirms a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaoskit.substrate.core.launched_ranks import LaunchedRank, strength
from chaoskit.substrate.core.processes import Process


@dataclass(frozen=True, slots=True)
class Seat:
    """The process that has a rank. ``variable`` is the variable that shows it; "" if none does."""

    rank: int
    node: str
    process: Process
    variable: str


def seats(ranks: Mapping[str, Mapping[Process, LaunchedRank]]) -> dict[int, Seat]:
    """Return rank -> process, by the strongest variable that any process has.

    Of several processes with one rank the youngest counts. The result is empty if no process has a
    rank.

    Args:
        ranks: the live processes that were started with a rank, by node.
    """
    all_seats = [
        Seat(launched.rank, node, process, launched.variable)
        for node, processes in ranks.items()
        for process, launched in processes.items()
    ]
    strongest = min((seat.variable for seat in all_seats), key=strength, default="")
    by_rank: dict[int, list[Seat]] = {}
    for seat in all_seats:
        if seat.variable == strongest:
            by_rank.setdefault(seat.rank, []).append(seat)
    return {rank: _youngest(seats_of_rank) for rank, seats_of_rank in sorted(by_rank.items())}


def seats_by_node(nodes: Mapping[str, Sequence[Process]]) -> dict[int, Seat]:
    """Return rank -> process for processes without a variable: rank n is the first one of node n.

    A node without processes has no rank.

    Args:
        nodes: the live processes by node; the command's own process comes first.
    """
    return {
        number: Seat(number, node, processes[0], variable="")
        for number, (node, processes) in enumerate(nodes.items())
        if processes
    }


def _youngest(seats_of_rank: Iterable[Seat]) -> Seat:
    """Return the newest of several attempts of one rank."""
    return max(seats_of_rank, key=lambda seat: seat.process.ticks or 0)
