"""The rank of a process, read from the environment variables that its launcher set.

-> ``cluster/command_runner.py`` writes the ranks to the journal; ``stacks/ranks.py`` chooses the
process of each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from chaoskit.process.linux import is_ending, parent, variables

#: Variables that carry a rank, the strongest first. A launcher may itself have a rank by one of
#: them, as a task of srun has, and start processes whose rank comes from a stronger one.
VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "LOCAL_RANK")
_LOCAL = "LOCAL_RANK"
#: Stands for a variable if the rank is that of a log. It is weaker than all of them.
LOG = "log"


class LaunchedRank(NamedTuple):
    """A rank, and the variable that it was read from, or :data:`LOG`."""

    rank: int
    variable: str


def rank_of(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank by the strongest variable that has one, or None if none has."""
    for name in VARIABLES:
        rank = _rank_from_local_rank(environment) if name == _LOCAL else _number(environment, name)
        if rank is not None:
            return LaunchedRank(rank, name)
    return None


def own_ranks(pids: Iterable[int]) -> dict[int, LaunchedRank]:
    """Return pid -> rank of the processes of this host that were started with a rank.

    A process whose parent is among ``pids`` and has the same rank has inherited it, and is left
    out. So are processes that are ending.
    """
    ranks = {pid: rank_of(variables(pid)) for pid in pids}
    return {
        pid: rank
        for pid, rank in ranks.items()
        if rank is not None and ranks.get(parent(pid) or 0) != rank and not is_ending(pid)
    }


def strength(variable: str) -> int:
    """Return the index of a variable in :data:`VARIABLES`: the smaller, the stronger.

    A variable that is not among them is weaker than all.
    """
    return VARIABLES.index(variable) if variable in VARIABLES else len(VARIABLES)


def _rank_from_local_rank(environment: Mapping[str, str]) -> int | None:
    """Return the global rank that follows from the local rank; on the first node they are equal.

    None is returned if there is no local rank, or the number of ranks per node is unknown.
    """
    local_rank, node_rank = _number(environment, _LOCAL), _number(environment, "NODE_RANK") or 0
    if local_rank is None or node_rank == 0:
        return local_rank
    ranks_per_node = _number(environment, "LOCAL_WORLD_SIZE")
    if ranks_per_node is None and (world_size := _number(environment, "WORLD_SIZE")) is not None:
        ranks_per_node = world_size // max(1, _number(environment, "NNODES") or 1)
    return None if ranks_per_node is None else node_rank * ranks_per_node + local_rank


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number; None unless it consists of decimal digits."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
