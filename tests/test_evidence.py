"""What must not count as evidence, nor excuse anything. Pure: targets and journals are written by hand."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from chaoskit import wire
from chaoskit.messages import Message, WorkerLost
from chaoskit.runtime.levers.numbers import Poison
from chaoskit.substrate.base import Process
from chaoskit.substrate.undo import UndoLog
from faults import Exit, Hang, KillAgent, KillNode, Preempt
from faults.base import Fault, Target


@pytest.fixture
def undo(tmp_path: Path) -> Any:
    log = UndoLog(tmp_path)
    yield log
    log.close()


class Deserted:
    """What is left of a cluster when its run is over: a connection that is closed."""

    def send(self, message: Message) -> None:
        with socket.socket() as closed:
            closed.close()
            wire.send(closed, message)


def target(undo: UndoLog, **known: Any) -> Target:
    """Rank 1 of a run that is over, struck in its step 8."""
    where: dict[str, Any] = {"worker": "node1.w0", "node": "node1", "rank": 1, "step": 8, "phase": "forward"}
    process = {"pid": 2**22 + 1, "tid": 2**22 + 1, "ticks": 1}  # above the largest pid
    gone: Any = Deserted()
    return Target(cluster=gone, undo=undo, fault_id="fault0", **where, **process, **known)


def seen(fault: Fault, struck: Target) -> bool:
    return fault.observe(struck) is not None


def test_the_end_of_the_job_is_no_early_exit(undo: UndoLog) -> None:
    """Every worker exits with status 0 in the end, a rank that ignored the fault, too."""
    struck = target(undo, exited=("exited", "status 0"))
    assert not seen(Exit(rank=1, at_step=8), struck)
    struck.lost = WorkerLost("node1.w0", "node1", "exited", "exited with status 0", 1)
    assert seen(Exit(rank=1, at_step=8), struck)


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_a_nan_is_written_whatever_the_strides(where: str) -> None:
    """A transposed tensor cannot be seen as one row: the fault would have been an exception."""
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.ones(3, 2).t())
    reports: list[bool] = []
    options = {"where": where, "parameter": "weight", "sticky": False}
    Poison(model, options, lambda effective, observed: reports.append(effective)).arm()
    (model.weight * torch.ones(3, 2).t()).sum().backward()
    poisoned = model.weight if where == "weight" else model.weight.grad
    assert poisoned is not None
    assert int(poisoned.isnan().sum()) == 1
    assert reports == [True]


def test_a_question_that_nobody_carries_is_not_left_unanswered(undo: UndoLog) -> None:
    """After the run, for one: the silence of the worker means nothing, and is no error either."""
    struck = target(undo)
    assert not seen(Hang(rank=1, at_step=8, how="gil"), struck)
    assert "asked" not in struck.notes


@pytest.mark.parametrize("kind", [KillAgent, KillNode, Preempt])
def test_the_end_of_the_run_is_not_the_end_of_a_node(undo: UndoLog, kind: type[Fault]) -> None:
    """In the end no process is left, whatever the signal did. An agent that saw its worker end was not ended first."""
    gone = [Process(2**22 + 1, 1, "ck-node1"), Process(2**22 + 2, 1, "ck-node1.w0")]
    struck = target(undo, notes={"processes": gone})
    assert seen(kind(rank=1, at_step=8), struck)
    struck.exited = ("exited", "status 0")
    assert not seen(kind(rank=1, at_step=8), struck)
