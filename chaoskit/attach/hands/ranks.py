"""The ranks of processes that a hand lists.

-> substrate/core/launched_ranks.py: the variables that carry a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaoskit.substrate.core.launched_ranks import rank_of

#: A process in the answer of a hand to ``list``.
ListedProcess = Mapping[str, Any]


def listed_ranks(processes: Sequence[ListedProcess]) -> dict[int, int]:
    """Return pid -> rank of the processes that train.

    A process that inherited its rank, such as a data loader, is left out. So is a launcher: a
    process below it has another rank.
    """
    parents = {process["pid"]: process["parent"] for process in processes}
    ranks = {
        process["pid"]: launched.rank
        for process in processes
        if (launched := rank_of(process["variables"])) is not None
    }
    launchers = {
        ancestor
        for pid, rank in ranks.items()
        for ancestor in _ancestors(pid, parents)
        if ranks.get(ancestor, rank) != rank
    }
    return {
        pid: rank
        for pid, rank in ranks.items()
        if pid not in launchers and ranks.get(parents[pid]) != rank
    }


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, as far as they are listed."""
    visited = {pid}
    while (pid := parents.get(pid, 0)) in parents and pid not in visited:
        visited.add(pid)
        yield pid


def why_unread(processes: Sequence[ListedProcess]) -> str:
    """Return why no process has a rank: some could not be read, or none was started with one."""
    denied = [process for process in processes if process["environ"] == "denied"]
    if not denied:
        return "no process was started with a rank"
    needs = denied[-1]["needs"]
    return (
        f"{len(denied)} processes cannot be read: a hand needs uid {needs['uid']}, "
        f"gid {needs['gid']} and the capabilities of its target"
    )
