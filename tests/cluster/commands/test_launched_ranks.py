"""The rank of a command's process, by the variables of torchrun, Slurm, MPI and scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_until

from chaoskit.process.linux import variables
from chaoskit.pytest_plugin import Chaos
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.ranks import seats
from chaoskit.substrate.core.command_environment import inherited_variables
from chaoskit.substrate.core.launched_ranks import VARIABLES, rank_of
from chaoskit.substrate.core.processes import HOST, Process
from chaoskit.vocabulary import Event, Verdict
from faults import Kill


@pytest.mark.parametrize(
    ("given", "rank", "variable"),
    [
        ("RANK=3 LOCAL_RANK=1 SLURM_PROCID=0", 3, "RANK"),
        ("SLURM_PROCID=2 SLURM_LOCALID=0", 2, "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=0", 1, "OMPI_COMM_WORLD_RANK"),
        ("PMIX_RANK=5 PMI_RANK=4", 5, "PMIX_RANK"),
        ("PMI_RANK=4", 4, "PMI_RANK"),
        ("LOCAL_RANK=1", 1, "LOCAL_RANK"),
        ("LOCAL_RANK=1 NODE_RANK=0 NNODES=2", 1, "LOCAL_RANK"),
        ("LOCAL_RANK=1 NODE_RANK=2 NNODES=3 LOCAL_WORLD_SIZE=4", 9, "LOCAL_RANK"),
        ("LOCAL_RANK=1 NODE_RANK=1 NNODES=2 WORLD_SIZE=4", 3, "LOCAL_RANK"),
        ("LOCAL_RANK=1 NODE_RANK=1 NNODES=2", None, ""),
        ("RANK=-1 WORLD_SIZE=2", None, ""),
        ("RANK= SLURM_PROCID=x", None, ""),
        ("NODE_RANK=0 NNODES=1", None, ""),
    ],
)
def test_the_strongest_variable_tells_the_rank(given: str, rank: int | None, variable: str) -> None:
    seat = rank_of(dict(pair.split("=") for pair in given.split()))
    assert seat == (None if rank is None else (rank, variable))


@contextmanager
def session(script: str, count: int) -> Iterator[list[Process]]:
    """Yield a shell and the processes that it started, when there are ``count`` of them."""
    shell = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        root = HOST.find(shell.pid)
        yield wait_until(
            lambda: tree if len(tree := HOST.tree(root)) >= count else [], f"{count} processes"
        )
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.mark.parametrize("variable", VARIABLES)
def test_processes_are_found_by_each_variable(variable: str) -> None:
    """A process that a rank has started, such as a data loader, has no rank of its own."""
    script = "".join(f"{variable}={rank} sh -c 'sleep 60 & wait' & " for rank in range(2))
    with session(f"{script} wait", 5) as processes:
        ranks = wait_until(
            lambda: (
                both
                if len(both := seats({"node0": HOST.launched_ranks(processes[0])})) == 2
                else {}
            ),
            "two ranks",
        )
        assert [seat.variable for seat in ranks.values()] == [variable, variable]
        assert {seat.process.pid for seat in ranks.values()} < {
            process.pid for process in processes[1:]
        }
        assert len({variables(seat.process.pid)[variable] for seat in ranks.values()}) == 2


def test_a_launcher_with_a_rank_of_its_own_is_none_of_the_ranks() -> None:
    """A launcher that has a rank, as torchrun in a task of srun, is not one of the ranks below it.

    The workers inherit the variables of Slurm.
    """
    script = "SLURM_PROCID=0 sh -c 'RANK=0 sleep 60 & RANK=1 sleep 60 & wait' & wait"
    with session(script, 4) as processes:
        ranks = wait_until(
            lambda: (
                both
                if len(both := seats({"node0": HOST.launched_ranks(processes[0])})) == 2
                else {}
            ),
            "two ranks",
        )
        assert {rank: seat.variable for rank, seat in ranks.items()} == {0: "RANK", 1: "RANK"}
        assert {HOST.find(seat.process.pid).name for seat in ranks.values()} == {"sleep"}


def test_a_command_inherits_no_rank_of_the_harness() -> None:
    assert inherited_variables(dict.fromkeys([*VARIABLES, "HOME"], "0")) == {"HOME": "0"}


# -- in runs ---------------------------------------------------------------------------------------

STEPS = LogPatterns(step=r"step (\d+)")
TRAIN = "for n in $(seq 0 60); do echo step $n; sleep 0.05; done"


def test_ranks_of_slurm_are_struck(chaos: Chaos) -> None:
    """The launcher is a task of Slurm itself, and the variable of the ranks takes precedence."""
    script = f"SLURM_PROCID=0 sh -c 'for r in 0 1; do RANK=$r sh -c \"{TRAIN}\" & done; wait'"
    outcome = chaos.run(
        command=["sh", "-c", script.replace("$n", "\\$n").replace("$(", "\\$(")],
        ranks=2,
        faults=[Kill(rank=0, at_step=3)],
        watch=STEPS,
        twin=False,
        check=False,
    )
    (injected,) = outcome.records(Event.INJECTED)
    by_variable = {
        (record["variable"], record["pid"]) for record in outcome.records(Event.RANK_FOUND)
    }
    assert ("RANK", injected["pid"]) in by_variable, outcome.reasons


SPAWNED = """
import multiprocessing, os, sys, time

def work(rank):
    for step in range(40):
        print(f"step {step}", flush=True)
        time.sleep(0.05)

if __name__ == "__main__":
    context, processes = multiprocessing.get_context("spawn"), []
    for rank in range(2):
        if sys.argv[1] == "set":
            os.environ["RANK"] = str(rank)
        processes.append(context.Process(target=work, args=(rank,)))
        processes[-1].start()
    for process in processes:
        process.join()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_without_a_variable_are_not_found_and_the_message_says_what_to_set(
    chaos: Chaos, tmp_path: Path, rank: int
) -> None:
    """No other process is struck in their place, such as the process that has started them."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    fault = Kill(rank=rank, at_step=3)
    command = [sys.executable, str(tmp_path / "spawned.py"), "no"]
    outcome = chaos.run(
        command=command, ranks=2, faults=[fault], watch=STEPS, twin=False, check=False
    )
    assert outcome.verdict is Verdict.UNKNOWN
    assert not outcome.records(Event.INJECTED)
    assert "or set RANK in the environment of each before it starts" in " ".join(outcome.reasons)


def test_the_remedy_of_the_message_works(chaos: Chaos, tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    fault = Kill(rank=1, at_step=3)
    command = [sys.executable, str(tmp_path / "spawned.py"), "set"]
    outcome = chaos.run(
        command=command, ranks=2, faults=[fault], watch=STEPS, twin=False, check=False
    )
    (injected,) = outcome.records(Event.INJECTED)
    assert injected["rank"] == 1
