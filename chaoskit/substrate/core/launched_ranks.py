"""The rank of a process, by the variables that its launcher gave it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Variables that tell a process its rank, the strongest first. A launcher may have a rank by one variable, such as a
#: task of srun, and start processes that have theirs by a stronger one.
VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "LOCAL_RANK")
_LOCAL = "LOCAL_RANK"


class LaunchedRank(NamedTuple):
    """A rank, and the variable that tells it."""

    rank: int
    variable: str


def rank_of(variables: Mapping[str, str]) -> LaunchedRank | None:
    """Return the rank that the variables of a process tell, by the strongest of them; None where none does."""
    for name in VARIABLES:
        rank = _by_local_rank(variables) if name == _LOCAL else _number(variables, name)
        if rank is not None:
            return LaunchedRank(rank, name)
    return None


def strength(variable: str) -> int:
    """Return the place of a variable in :data:`VARIABLES`: the smaller, the stronger."""
    return VARIABLES.index(variable) if variable in VARIABLES else len(VARIABLES)


def _by_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank by its number on its node, where it is known how many each node has."""
    local, node = _number(variables, _LOCAL), _number(variables, "NODE_RANK") or 0
    if local is None or node == 0:
        return local
    per_node = _number(variables, "LOCAL_WORLD_SIZE")
    if per_node is None and (size := _number(variables, "WORLD_SIZE")) is not None:
        per_node = size // max(1, _number(variables, "NNODES") or 1)
    return None if per_node is None else node * per_node + local


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    return int(value) if value.isdecimal() else None
