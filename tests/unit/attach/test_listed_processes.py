"""The tree and the ranks of processes that a hand lists. No I/O."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.attach.hands.ranks import is_ending, listed_ranks, listed_tree, why_unread
from chaoskit.hand import PROGRAM_NAME
from chaoskit.substrate.core.launched_ranks import LaunchedRank


def listed(
    pid: int, parent: int, rank: int | None = None, environ: str = "read", **variables: str
) -> dict[str, Any]:
    ranks = {} if rank is None else {"RANK": str(rank)}
    needs = {"needs": {"uid": 0, "gid": 0}} if environ == "denied" else {}
    return {
        "pid": pid,
        "parent": parent,
        "name": "python3",
        "state": "S",
        "exiting": False,
        "variables": {**ranks, **variables},
        "environ": environ,
        **needs,
    }


def ranks_of(processes: list[dict[str, Any]]) -> dict[int, int]:
    return {pid: launched.rank for pid, launched in listed_ranks(processes).items()}


def test_a_launcher_with_a_rank_of_its_own_and_children_of_ranks_have_no_rank() -> None:
    """A PyTorchJob gives its container a RANK, and torchrun in it starts others."""
    launcher, loader = listed(1, 0, 1), listed(12, 10, 2)
    processes = [launcher, listed(10, 1, 2), listed(11, 1, 3), loader, listed(20, 0, None)]
    assert ranks_of(processes) == {10: 2, 11: 3}
    assert ranks_of([listed(1, 0, 4), listed(2, 1, 4)]) == {1: 4}


def test_a_child_counts_that_has_the_rank_of_its_launcher() -> None:
    """The first container of a PyTorchJob has rank 0, and the first process in it, too."""
    loader = listed(12, 10, 0)
    assert ranks_of([listed(1, 0, 0), listed(10, 1, 0), listed(11, 1, 1), loader]) == {10: 0, 11: 1}


def test_a_helper_of_a_launcher_has_no_rank_beside_the_worker_that_has_it() -> None:
    workers = [listed(pid, 1, pid - 10, TORCHELASTIC_RESTART_COUNT="0") for pid in (10, 11)]
    assert ranks_of([listed(1, 0, 0), listed(9, 1, 0), *workers]) == {10: 0, 11: 1}


def test_a_worker_of_torchrun_counts_though_its_container_has_the_same_rank() -> None:
    """A PyTorchJob with one process a pod: the rank of the pod is the rank of the worker."""
    restarts = {"TORCHELASTIC_RESTART_COUNT": "0"}
    launcher, worker = listed(1, 0, 1), listed(10, 1, 1, **restarts)
    assert ranks_of([launcher, worker, listed(11, 10, 1, **restarts)]) == {10: 1}


def test_a_task_of_slurm_that_starts_its_own_rank_is_a_launcher() -> None:
    task = listed(1, 0, None, SLURM_PROCID="0")
    workers = [listed(pid, 1, pid - 10, SLURM_PROCID="0") for pid in (10, 11)]
    assert listed_ranks([task]) == {1: LaunchedRank(0, "SLURM_PROCID")}
    assert listed_ranks([task, *workers]) == {
        10: LaunchedRank(0, "RANK"),
        11: LaunchedRank(1, "RANK"),
    }


def test_processes_that_could_not_be_read_are_the_reason_for_missing_ranks() -> None:
    assert why_unread([listed(1, 0, None)]) == "no process was started with a rank"
    assert "uid 0, gid 0" in why_unread([listed(1, 0, None, environ="denied")])


def test_hands_and_processes_beside_the_root_are_not_in_its_tree() -> None:
    """A hand enters a container from outside: its parent is 0. One of a user may be below it."""
    below = listed(7, 1) | {"name": PROGRAM_NAME}
    processes = [listed(1, 0), listed(5, 3), below, listed(8, 7), listed(9, 0), listed(3, 1)]
    assert [process["pid"] for process in listed_tree(processes, 1)] == [1, 3, 5]
    assert listed_tree(processes, 2) == []


def test_zombies_and_processes_that_exit_are_ending() -> None:
    assert not is_ending(listed(1, 0))
    assert is_ending(listed(1, 0) | {"state": "Z"})
    assert is_ending(listed(1, 0) | {"exiting": True})


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 12), max_size=12), st.integers(1, 12))
def test_the_tree_of_any_list_has_each_process_once_and_after_its_parent(
    parents: dict[int, int], root: int
) -> None:
    """Parents may change while a hand makes its list, so that they form a circle."""
    pids = [p["pid"] for p in listed_tree([listed(*pair) for pair in parents.items()], root)]
    assert pids[:1] == ([root] if root in parents else [])
    assert len(pids) == len(set(pids))
    for number, pid in enumerate(pids[1:], start=1):
        assert parents[pid] in pids[:number]


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 3), max_size=12))
def test_processes_that_train_are_not_below_each_other(parents: dict[int, int]) -> None:
    """Each pid is also a rank, so that every process below another one has its own."""
    acyclic = {pid: parent for pid, parent in parents.items() if parent < pid}
    trains = listed_ranks([listed(pid, parent, pid) for pid, parent in acyclic.items()])
    assert set(trains) == acyclic.keys() - acyclic.values()
