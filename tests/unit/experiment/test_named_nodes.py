"""Faults that name a node of a running job, judged from records: the node is the target, not a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.jobs.recorded_run import S, TimedRecord, recorded_run

from chaoskit.experiment.judge.command_audit import audit
from chaoskit.experiment.judge.command_judge import judge_command
from chaoskit.experiment.plan.command_plan import CommandExperiment, RunningJob
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.run.legibility import why_uncountable
from chaoskit.experiment.run.run_events import event_of
from chaoskit.faults import Fault, KillNode
from chaoskit.faults.evidence import NO_RANK, NodeGone, WholeNode
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event, RunEnd, Verdict

BY_TIME = KillNode(node="llama-1", after_s=1.0)
AT_STEP = KillNode(node="llama-1", at_step=2)
EXPERIMENT = CommandExperiment(
    name="llama",
    command=(),
    watch=LogPatterns(step=r"step (\d+)"),
    nodes=2,
    ranks=0,
    seed=0,
    faults=(),
    working_directory="",
    deadline_s=60.0,
    running_job=RunningJob("statefulset/llama", "ml", 10.0),
)
LIFE: dict[str, Any] = {"uid": "u", "container_id": "c"}
OBSERVED: TimedRecord = (0, Event.LIFE_OBSERVED, LIFE)
ENDED: TimedRecord = (2.6, Event.LIFE_ENDED, {**LIFE, "cause": "killed"})
SUCCESSOR: TimedRecord = (4, Event.LIFE_OBSERVED, {**LIFE, "container_id": "d"})
LIVES = (OBSERVED, ENDED, SUCCESSOR)


def step(at_s: float, number: int, node: str = "llama-0") -> TimedRecord:
    return at_s, Event.LOGGED, {"node": node, "step": number, "loss": None}


def struck(fault: Fault, at_s: float = 2.5, node: str = "llama-1") -> list[TimedRecord]:
    """Return the records of a strike on the first process of a node, and of its evidence."""
    injected: dict[str, Any] = {"fault": "fault0", "what": str(fault), "generation": None}
    injected |= {"worker": f"{node}.1", "rank": NO_RANK, "node": node, "nodes": [node], "pid": 1}
    shown_step = max(2, int(at_s) - 4)
    injected |= {
        "ticks": 5,
        "step": shown_step,
        "phase": "",
        "waiting": "",
        "done_ns": int(at_s * S),
    }
    gone = NodeGone(subject=WholeNode(node), source="kernel", first="python", pids=(1,))
    shown = {"fault": "fault0", "level": "effective", "observed": str(gone)}
    shown |= {"evidence": msgspec.to_builtins(gone)}
    return [(at_s, Event.INJECTED, injected), (at_s + 0.1, Event.EVIDENCE, shown)]


def run_of(
    directory: Path,
    fault: Fault,
    *strike: TimedRecord,
    lives: tuple[TimedRecord, ...] = LIVES,
) -> CommandRun:
    """Return a run whose log shows steps 1 and 2 before 2.5 s, and 1 to 5 after 5 s."""
    before = [step(1, 1), step(2, 2)]
    after = [step(4 + number, number) for number in range(1, 6)]
    experiment = replace(EXPERIMENT, faults=(fault,))
    records = sorted([*before, *strike, *after], key=lambda record: record[0])
    return recorded_run(directory, experiment, RunEnd.OBSERVED, 20, records, lives)


@pytest.mark.parametrize("fault", [BY_TIME, AT_STEP], ids=["time", "step"])
def test_a_node_that_was_struck_as_planned(tmp_path: Path, fault: Fault) -> None:
    run = run_of(tmp_path, fault, *struck(fault))
    assert audit(run, is_whole=True) == []
    assert why_uncountable(run, lambda number: 1) == ""
    outcome = judge_command(run, None, "attached")
    (record,) = outcome.faults
    assert (record.fault, record.rank, record.state) == (str(fault), None, "confirmed")
    assert record.evidence[0].observed == (
        "the first process of llama-1 (pid 1) was alive, and the log showed step 2; "
        "its phase is not known"
    )
    assert [recovery.fault for recovery in outcome.recoveries] == [str(fault)]


@pytest.mark.parametrize(
    ("fault", "strike", "lives", "verdict", "words"),
    [
        (BY_TIME, struck(BY_TIME, node="llama-0"), LIVES, Verdict.ERROR, "not llama-1"),
        (BY_TIME, struck(BY_TIME), (), Verdict.UNKNOWN, "recorded no container that ran"),
        (BY_TIME, struck(BY_TIME, 3.0), LIVES, Verdict.UNKNOWN, "no container that ran"),
        (BY_TIME, struck(BY_TIME, 1.5), LIVES, Verdict.ERROR, "0.500 s after the log showed"),
    ],
    ids=["another node", "no life", "between two lives", "too early"],
)
def test_a_strike_that_differs_from_the_plan(
    tmp_path: Path,
    fault: Fault,
    strike: list[TimedRecord],
    lives: tuple[TimedRecord, ...],
    verdict: Verdict,
    words: str,
) -> None:
    checks = audit(run_of(tmp_path, fault, *strike, lives=lives), is_whole=True)
    assert [check.verdict for check in checks] == [verdict]
    assert words in checks[0].detail


@pytest.mark.parametrize(
    ("lives", "is_late"), [((OBSERVED,), True), (LIVES, False)], ids=["one life", "another life"]
)
def test_a_strike_long_after_its_step(
    tmp_path: Path, lives: tuple[TimedRecord, ...], is_late: bool
) -> None:
    """A node without a container meanwhile explains the delay."""
    run = run_of(tmp_path, AT_STEP, *struck(AT_STEP, 7.5), lives=lives)
    checks = audit(run, is_whole=True)
    assert [check.verdict for check in checks] == [Verdict.ERROR] * is_late
    assert not is_late or "long after step 2" in checks[0].detail


def test_a_fault_that_found_no_container(tmp_path: Path) -> None:
    missed = {"fault": "fault0", "what": str(BY_TIME), "reason": ""}
    outcome = judge_command(run_of(tmp_path, BY_TIME, (9, Event.FAULT_MISSED, missed)), None, "")
    (check,) = (check for check in outcome.checks if check.name == f"evidence of {BY_TIME}")
    assert check.verdict is Verdict.UNKNOWN
    assert "node llama-1 was held by no process" in check.detail


@pytest.mark.parametrize("has_life", [True, False])
def test_steps_begin_anew_with_a_container(tmp_path: Path, has_life: bool) -> None:
    """A second restart after one fault is no sign that steps are counted in epochs."""
    times_s = {1: 1, 2: 2, 4: 1, 5: 2, 7: 1, 8: 2}
    lines = [step(at_s, number, "llama-1") for at_s, number in times_s.items()]
    records = sorted([*lines, *struck(BY_TIME)], key=lambda record: record[0])
    lives = [OBSERVED, (6.5, Event.LIFE_OBSERVED, {**LIFE, "container_id": "e"})]
    experiment = replace(EXPERIMENT, faults=(BY_TIME,))
    run = recorded_run(
        tmp_path, experiment, RunEnd.OBSERVED, 20, records, lives if has_life else ()
    )
    assert ("steps begin anew" in why_uncountable(run, lambda number: 1)) is not has_life


def test_the_event_names_the_node(tmp_path: Path) -> None:
    run = run_of(tmp_path, BY_TIME, *struck(BY_TIME))
    (injected,) = (record for record in run.records if record.event == Event.INJECTED)
    event = event_of(injected)
    assert event is not None
    assert event.text == (
        f"{BY_TIME}: at the first process (worker llama-1.1) on llama-1, all of llama-1, step 2"
    )
