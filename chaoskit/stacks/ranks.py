"""Which process is which rank, as launchers of distributed training tell it to their children: by ``RANK``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from chaoskit.osprocess import is_ending, parent, variable
from chaoskit.substrate.processes import Process


@dataclass(frozen=True, slots=True)
class Seat:
    """The process that has a rank. ``told``: it was given that by a variable."""

    rank: int
    node: str
    process: Process
    told: bool = True


def seats(nodes: Mapping[str, Sequence[Process]]) -> dict[int, Seat]:
    """Rank -> process, of the live processes of all nodes, those of each node from the first one down.

    Where no process has a variable RANK, the first process of node n is rank n.
    """
    told: dict[int, list[Seat]] = {}
    for node, processes in nodes.items():
        ranks = {process.pid: _rank(process.pid) for process in processes}
        for process in processes:
            rank = ranks[process.pid]
            # what a rank starts, such as loaders of data, inherits its environment
            if rank is not None and ranks.get(parent(process.pid) or 0) != rank and not is_ending(process.pid):
                told.setdefault(rank, []).append(Seat(rank, node, process))
    if told:
        return {rank: _youngest(found) for rank, found in sorted(told.items())}
    first = {number: (node, processes[0]) for number, (node, processes) in enumerate(nodes.items()) if processes}
    return {number: Seat(number, node, process, told=False) for number, (node, process) in first.items()}


def _youngest(found: Iterable[Seat]) -> Seat:
    """Of several attempts of one rank, the newest."""
    return max(found, key=lambda seat: seat.process.ticks or 0)


def _rank(pid: int) -> int | None:
    """The variable RANK with which a process was started."""
    value = variable(pid, "RANK")
    return int(value) if value is not None and value.isdecimal() else None
