"""What must not count as evidence, nor excuse anything. Pure: targets and journals are written by hand."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from chaoskit import wire
from chaoskit.experiment.conductor import Strike
from chaoskit.experiment.history import History
from chaoskit.experiment.plan import plan_experiment
from chaoskit.experiment.properties import Trace
from chaoskit.experiment.properties.progress import corruption, slow_ranks
from chaoskit.experiment.run import RawRun
from chaoskit.experiment.timeline import Timeline
from chaoskit.journal import Record
from chaoskit.messages import Message, WorkerLost
from chaoskit.runtime.levers.numbers import Poison
from chaoskit.substrate.base import Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Event
from faults import BadBatch, BitFlip, ClockJump, Exit, Hang, Kill, KillAgent, KillNode, Preempt, Straggle
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


# -- excuses ------------------------------------------------------------------------------------------------------

STRUCK_NS, LOST_NS, ENDED_NS = 1_000, 5_000, 9_000


def strike(fault: Fault, undo: UndoLog, missed: str = "") -> Strike:
    """``fault`` on the worker ``node1.w0``."""
    struck = target(undo, injected_ns=STRUCK_NS, claims={"node1.w0": STRUCK_NS})
    return Strike("fault0", fault, target=struck, effective_ns=None if missed else STRUCK_NS, missed=missed)


def run_of(strikes: list[Strike], records: list[Record], **plan: Any) -> RawRun:
    experiment = plan_experiment("gpt", nodes=3, **plan)
    run = RawRun(experiment, Path(), 0, ENDED_NS, None, deadline_passed=False, strikes=strikes)
    run.__dict__["records"] = [*records, Record(ENDED_NS, "coordinator", Event.JOB_ENDED, {"ok": True})]
    return run


def trace_of(run: RawRun) -> Trace:
    return Trace(run, History(run.records), [])


def lost(worker: str, cause: str, t_ns: int = LOST_NS) -> Record:
    fields = {"worker": worker, "rank": 1, "cause": cause, "detail": ""}
    return Record(t_ns, "coordinator", Event.DETECTED, fields)


def test_a_fault_that_came_too_late_excuses_nobody(undo: UndoLog) -> None:
    """A slow rank was called hung and ended; the kill that was due later found nobody."""
    slow, late = Straggle(rank=1, at_step=8, delay_ms=10), Kill(rank=1, at_step=9)
    alarm = [lost("node1.w0", "hung")]
    assert slow_ranks(trace_of(run_of([strike(slow, undo), strike(late, undo)], alarm))) == []
    for missed in (late, KillNode(rank=1, at_step=9)):
        run = run_of([strike(slow, undo), strike(missed, undo, missed="the target was gone already")], alarm)
        assert slow_ranks(trace_of(run)) == [f"node1.w0 was only struck by {slow}, and given up: hung"]


def test_a_later_loss_is_no_detection_of_corrupt_memory(undo: UndoLog) -> None:
    """A flipped bit that nobody found within the promised steps, on a rank that was lost much later."""
    flip = BitFlip(rank=1, at_step=8, parameter="w", bit=3)
    fields = {"generation": 1, "rank": 0, "world": 3, "loss": 1.0, "grad_sum": 1}
    commits = [Record(STRUCK_NS + step, "node0.w0", Event.COMMIT, {"step": step, **fields}) for step in range(20)]

    def found(*more: Record) -> object:
        return corruption(trace_of(run_of([strike(flip, undo)], [*commits, *more], state_hash_steps=4)))

    missed = [f"{flip} was not found by step 12"]
    assert found() == missed
    assert found(lost("node1.w0", "killed", STRUCK_NS + 15)) == missed
    assert found(lost("node1.w0", "killed", STRUCK_NS + 11)) == []
    named = {"worker": "node1.w0", "sources": [], "step": 10, "verdict": "rank", "generation": 1}
    assert found(Record(STRUCK_NS + 10, "node0.w0", Event.CORRUPT, named)) == []


@pytest.mark.parametrize("fault", [BadBatch(at_step=8), ClockJump(rank=1, at_step=8, seconds=60.0)])
def test_whoever_reads_a_bad_batch_or_a_wrong_clock_is_not_to_blame(undo: UndoLog, fault: Fault) -> None:
    """The rank that stood at the fault's hook, though struck, is given up: that is a false alarm."""
    run = run_of([strike(fault, undo)], [lost("node1.w0", "nonfinite")])
    incidents, alarms = Timeline(run, History(run.records)).incidents()
    assert (incidents, [alarm["worker"] for alarm in alarms]) == ([], ["node1.w0"])
    run = run_of([strike(fault, undo), strike(Kill(rank=1, at_step=8), undo)], [lost("node1.w0", "killed")])
    assert Timeline(run, History(run.records)).incidents()[1] == []
