"""Real runs: the records that processes write about themselves, and about faults that strike them."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from chaoskit.errors import BadInput
from chaoskit.journal import Journals, Record, load_journals
from chaoskit.pytest_plugin import Chaos
from chaoskit.runlog.outcome import Outcome
from chaoskit.stacks import LogPatterns
from chaoskit.suites.goals import happened
from chaoskit.vocabulary import Event, Verdict
from faults import CrashLoop, Fault, Kill

PLAIN = "../../jobs/failing/troubled.py:plain"
LOGGED = Path(__file__).parents[2] / "jobs" / "logs" / "logged.py"
PROCESSES = {"harness", "coordinator", "agent", "keeper", "worker"}


def run(chaos: Chaos, *faults: Fault, job: str = PLAIN, **plan: Any) -> Outcome:
    """Run a job on two nodes with a spare, until the world is full again."""
    settings: dict[str, Any] = {
        "nodes": 2,
        "spares": 1,
        "steps": 20,
        "options": {"step_s": 0.02},
        "deadline_s": 120.0,
    }
    settings |= {"until": {"world": 2, "spares": 1}, "twin": False} | plan
    return chaos.run(job, faults=faults, **settings)


def run_command(chaos: Chaos, *faults: Fault, steps: int = 20, **plan: Any) -> Outcome:
    """Run a script on one node, as rank 0."""
    command = ["sh", "-c", f"RANK=0 exec {sys.executable} {LOGGED} {steps} 0.02 0"]
    watch = LogPatterns(step=r"step (\d+)", loss=r"loss ([\d.eE+-]+)")
    return chaos.run(
        command=command,
        watch=watch,
        faults=faults,
        twin=False,
        check=False,
        deadline_s=120.0,
        **plan,
    )


def journals(outcome: Outcome) -> Journals:
    return load_journals(Path(outcome.directory) / "journal")


def records(outcome: Outcome, *events: Event) -> list[Record]:
    return [record for record in journals(outcome).records if record.event in events]


# -- processes -------------------------------------------------------------------------------------


def test_every_process_says_what_it_is_and_why_it_ended(chaos: Chaos) -> None:
    """The journals of a run lack only the last record of the rank that was killed."""
    outcome = run(chaos, Kill(rank=1, at_step=6))
    files = journals(outcome).files.values()
    writers = [(file.source, writer) for file in files for writer in file.writers]
    assert not any(file.bad_lines or file.missing or file.repeated for file in files), files
    assert [source for source, writer in writers if writer.opened is None] == []
    assert {writer.role for _, writer in writers} == PROCESSES
    (injected,) = records(outcome, Event.INJECTED)
    assert [source for source, writer in writers if writer.closed is None] == [injected["worker"]]
    assert {
        writer.closed["reason"]
        for _, writer in writers
        if writer.closed and writer.role != "harness"
    } == {"the job ended"}
    for source, writer in writers:
        assert writer.opened is not None
        assert writer.opened["version"] == 2
        assert writer.node == (
            "" if writer.role in ("harness", "coordinator") else source.partition(".")[0]
        )
        assert writer.opened["torch"] == torch.__version__ or writer.role != "worker"


def test_the_process_that_runs_a_command_says_so_too(chaos: Chaos) -> None:
    outcome = run_command(chaos)
    files = journals(outcome).files
    assert [(writer.role, writer.node) for writer in files["node0"].writers] == [
        ("warden", "node0")
    ]
    assert [writer.role for writer in files["harness"].writers] == ["harness"]
    closed = [writer.closed for file in files.values() for writer in file.writers]
    assert None not in closed


# -- outcomes --------------------------------------------------------------------------------------


def test_an_outcome_bears_the_time_of_the_start(chaos: Chaos) -> None:
    """The start has millisecond precision, and is not the time of the judgement."""
    outcome = run(chaos)
    (started,) = records(outcome, Event.STARTED)
    assert datetime.fromisoformat(outcome.started).timestamp() == pytest.approx(
        started["unix_ns"] / 1e9, abs=0.002
    )
    outcome = run_command(chaos)
    harness, runner = (
        journals(outcome).files[name].writers[0].opened for name in ("harness", "node0")
    )
    assert harness is not None
    assert runner is not None
    began_s = datetime.fromisoformat(outcome.started).timestamp()
    assert harness["unix_ns"] / 1e9 - 0.002 <= began_s <= runner["unix_ns"] / 1e9


def test_versions_are_those_of_the_workers(chaos: Chaos) -> None:
    """The workers may have another torch than the harness, as in an image; that of a command is not
    available.
    """
    outcome = run(chaos, job="../../jobs/failing/other_torch.py:plain")
    assert outcome.environment["torch"] == "0.0.1+workers" != torch.__version__
    assert set(outcome.environment) == {"chaoskit", "torch", "python", "kernel", "machine"}
    assert "torch" not in run_command(chaos).environment


def test_a_job_that_finishes_no_step_has_not_completed(chaos: Chaos) -> None:
    outcome = chaos.run(
        "../../jobs/failing/troubled.py:gives_up",
        nodes=2,
        spares=0,
        twin=False,
        check=False,
        deadline_s=120.0,
    )
    assert not records(outcome, Event.COMMIT)
    (check,) = [check for check in outcome.checks if check.name == "training completed"]
    assert (check.verdict, check.detail) == (Verdict.FAILED, "no step was finished")


# -- faults ----------------------------------------------------------------------------------------


def test_all_of_an_act_is_written_down_and_where_the_worker_stood_by_itself(chaos: Chaos) -> None:
    """The harness records the target and its end; the worker and its agent record the same."""
    outcome = run(chaos, Kill(rank=1, at_step=6, phase="reduce"))
    (injected,) = records(outcome, Event.INJECTED)
    worker = injected["worker"]
    (stopped,) = [
        record for record in records(outcome, Event.HOOK_STOPPED) if record.source == worker
    ]
    place = {"step": 6, "generation": 1, "rank": 1, "phase": "reduce"}
    assert {name: injected[name] for name in place} == place
    assert stopped.fields == {"fault": "fault0", "peer": "", **place}
    assert stopped.t_ns < injected.t_ns
    (started,) = [
        record for record in records(outcome, Event.WORKER_STARTED) if record["worker"] == worker
    ]
    (ended,) = [
        record for record in records(outcome, Event.WORKER_EXITED) if record["worker"] == worker
    ]
    assert (started.source, started["pid"]) == (injected["node"], injected["pid"])
    assert (injected["waiting"], injected["nodes"]) == (worker, [])
    (evidence,) = records(
        outcome, Event.EVIDENCE
    )  # known to the parent alone, which reported it after the run
    assert (evidence.t_ns, evidence["observed"]) == (
        ended.t_ns,
        f"pid {injected['pid']} was killed by SIGKILL",
    )
    assert records(outcome, Event.ACTED, Event.FAULT_MISSED) == []


def test_every_further_act_of_a_fault_is_written_down(chaos: Chaos) -> None:
    goal = happened(
        chaos, Event.ACTED
    )  # a spare takes the rank before the replacement can be struck
    outcome = run(chaos, CrashLoop(rank=1, at_step=6, times=2), until=goal.until, watch=goal)
    (injected,) = records(outcome, Event.INJECTED)
    (acted,) = records(outcome, Event.ACTED)
    gone = {
        record["worker"]: record
        for record in records(outcome, Event.WORKER_EXITED)
        if record["how"] == "killed"
    }
    assert acted["worker"] != injected["worker"]
    assert (acted["fault"], acted["node"], acted["what"]) == (
        "fault0",
        injected["node"],
        injected["what"],
    )
    assert acted["pid"] == gone[acted["worker"]]["pid"]
    assert injected.t_ns < acted.t_ns < gone[acted["worker"]].t_ns
    evidence = records(outcome, Event.EVIDENCE)[-1]
    assert evidence["observed"] == outcome.faults[0].evidence[1].observed


def test_a_fault_that_did_not_act_is_written_down_with_the_reason(chaos: Chaos) -> None:
    outcome = run(chaos, Kill(rank=1, after_s=3600.0), check=False)
    (missed,) = records(outcome, Event.FAULT_MISSED)
    reason = "rank 1 was held by no process 3600 s after the first committed step"
    assert (missed["fault"], missed["what"], missed["reason"]) == (
        "fault0",
        "Kill(rank=1, after_s=3600.0)",
        reason,
    )
    assert records(outcome, Event.INJECTED, Event.EVIDENCE) == []


# -- the end ---------------------------------------------------------------------------------------


def test_how_a_run_ended_is_its_last_record_but_one(chaos: Chaos) -> None:
    outcome = run(chaos)
    (*_, ended, closed) = [
        record for record in journals(outcome).records if record.source == "harness"
    ]
    assert (ended.event, ended["reason"], ended["ok"], ended["exits"]) == (
        "run_ended",
        "ended",
        True,
        {},
    )
    assert [ended["detail"]] == [record["reason"] for record in records(outcome, Event.JOB_ENDED)]
    assert (closed.event, closed["reason"]) == ("closed", "ended")


def test_a_run_whose_time_is_up_says_so(chaos: Chaos) -> None:
    outcome = run(chaos, deadline_s=0.5, check=False)
    (ended,) = records(outcome, Event.RUN_ENDED)
    assert (ended["reason"], ended["ok"]) == ("deadline", False)


def test_a_run_that_breaks_off_says_why(chaos: Chaos) -> None:
    """A job refuses its option in a worker, and the last record has the reason."""
    with pytest.raises(BadInput):
        chaos.run("gpt", nodes=1, spares=0, steps=5, options={"size": "enormous"}, twin=False)
    directory = max(chaos.harness.directory.glob("[0-9]*-*"))
    (ended,) = [
        record
        for record in load_journals(directory / "journal").records
        if record.event == Event.RUN_ENDED
    ]
    assert (ended["reason"], ended["ok"]) == ("harness", False)
    assert ended["detail"].startswith("BadInput: ")


def test_how_a_command_ended_is_written_down_for_each_node(chaos: Chaos) -> None:
    outcome = run_command(chaos, Kill(rank=0, at_step=5), steps=200)
    (injected,) = records(outcome, Event.INJECTED)
    (started,) = records(outcome, Event.COMMAND_STARTED)
    assert (injected["node"], injected["pid"], injected["generation"]) == (
        "node0",
        started["pid"],
        None,
    )
    (ended,) = records(outcome, Event.RUN_ENDED)
    assert (ended["reason"], ended["ok"], ended["exits"]) == (
        "ended",
        False,
        {"node0": ["killed", "SIGKILL"]},
    )
