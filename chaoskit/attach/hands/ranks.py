"""The processes that a hand lists: their tree, and their ranks.

-> substrate/core/launched_ranks.py: the variables that carry a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaoskit.hand import PROGRAM_NAME
from chaoskit.substrate.core.launched_ranks import LaunchedRank, rank_of

#: A process in the answer of a hand to ``list``.
ListedProcess = Mapping[str, Any]
#: Variable that torchrun adds to those that its workers inherit from it.
_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"


def listed_tree(processes: Sequence[ListedProcess], root: int) -> list[ListedProcess]:
    """Return a process and its descendants, the nearest first; empty if it is not listed.

    Hands and the processes below them are left out.
    """
    by_pid, by_parent = dict[int, ListedProcess](), dict[int, list[ListedProcess]]()
    for process in processes:
        if process["name"] != PROGRAM_NAME:
            by_pid[process["pid"]] = process
            by_parent.setdefault(process["parent"], []).append(process)
    tree = [by_pid[root]] if root in by_pid else []
    listed = {root}  # parents may change while a hand makes its list
    for process in tree:
        children = [
            child for child in by_parent.get(process["pid"], ()) if child["pid"] not in listed
        ]
        listed.update(child["pid"] for child in children)
        tree += children  # the list grows during iteration
    return tree


def is_ending(process: ListedProcess) -> bool:
    """Return whether a process is a zombie, or runs none of its own code any more."""
    return process["state"] in ("Z", "X") or process["exiting"]


def listed_ranks(processes: Sequence[ListedProcess]) -> dict[int, LaunchedRank]:
    """Return pid -> rank of the processes that train.

    A process that inherited its rank, such as a data loader, is left out. So is a launcher: a
    process below it has another rank, or was started by torchrun with the same one. A child of a
    launcher may have the same rank as the launcher, unless another process trains with it.
    """
    parents = {process["pid"]: process["parent"] for process in processes}
    ranks = {
        process["pid"]: (launched, _TORCHRUN in process["variables"])
        for process in processes
        if (launched := rank_of(process["variables"])) is not None
    }
    launchers = {
        ancestor
        for pid, rank in ranks.items()
        for ancestor in _ancestors(pid, parents)
        if ranks.get(ancestor, rank) != rank
    }
    candidates = {pid: rank for pid, rank in ranks.items() if pid not in launchers}
    trains = {pid: rank[0] for pid, rank in candidates.items() if ranks.get(parents[pid]) != rank}
    own_ranks = set(trains.values())
    return trains | {
        pid: rank[0]
        for pid, rank in candidates.items()
        if parents[pid] in launchers and rank[0] not in own_ranks
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
