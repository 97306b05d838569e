"""Tests of the verdict on a job that goes on after the run, from its records alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.jobs.recorded_run import S, recorded_run
from support.jobs.recorded_run import TimedRecord as RunEvent

from chaoskit.experiment.injection.command_follower import GOOD
from chaoskit.experiment.judge.command_audit import audit
from chaoskit.experiment.plan.command_plan import CommandExperiment, RunningJob
from chaoskit.experiment.run.command_run import CommandRun
from chaoskit.experiment.run.running_job import (
    check_hands,
    goes_on,
    has_ended_well,
    hole_in_steps,
    why_standing,
    why_unclear,
)
from chaoskit.experiment.twin.command_twin import taken_nodes, unfinished
from chaoskit.faults import DeletePod, Fault, Hang, Kill, Straggle
from chaoskit.faults.target import ProcessExit
from chaoskit.stacks import LogPatterns
from chaoskit.vocabulary import Event, RunEnd, Verdict

FAULT = Kill(rank=1, at_step=3)
EXPERIMENT = CommandExperiment(
    name="llama",
    command=(),
    watch=LogPatterns(step=r"step (\d+)"),
    nodes=2,
    ranks=2,
    seed=0,
    faults=(FAULT,),
    working_directory="",
    deadline_s=60.0,
    stalled_s=20.0,
    running_job=RunningJob("statefulset/llama", "ml", 10.0),
)


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., CommandRun]:
    """Return a function that makes a run of records: (seconds, event, fields) by source."""

    def make(reason: RunEnd, ended_s: float, *records: RunEvent, node1: Any = ()) -> CommandRun:
        return recorded_run(tmp_path, EXPERIMENT, reason, ended_s, records, node1)

    return make


def step(at_s: float, number: int) -> RunEvent:
    return at_s, Event.LOGGED, {"node": "llama-0", "step": number, "loss": None}


def act(at_s: float) -> RunEvent:
    return at_s, Event.INJECTED, {"fault": "fault0", "node": "llama-1"}


def struck(at_s: float) -> RunEvent:
    fields: dict[str, Any] = {
        "fault": "fault0",
        "worker": "llama-1.9",
        "rank": 1,
        "node": "llama-1",
    }
    fields |= {"pid": 9, "ticks": 5, "step": 2, "phase": "", "waiting": "", "nodes": []}
    return at_s, Event.INJECTED, {**fields, "done_ns": int(at_s * S)}


STEPS = [step(1, 1), step(2, 2), act(2.5)]


@pytest.mark.parametrize(
    ("reason", "is_good"),
    [
        (RunEnd.OBSERVED, True),
        (RunEnd.ENDED, True),
        (RunEnd.ABORTED, False),
        (RunEnd.STALLED, False),
        (RunEnd.DEADLINE, False),
        (RunEnd.HARNESS, False),
    ],
)
def test_runs_that_end_well(
    run_of: Callable[..., CommandRun], reason: RunEnd, is_good: bool
) -> None:
    assert has_ended_well(run_of(reason, 20, *STEPS)) is is_good


def test_a_job_that_has_failed_is_no_good_end(run_of: Callable[..., CommandRun]) -> None:
    run = run_of(RunEnd.ENDED, 20, *STEPS)
    run.exits = {"llama-0": GOOD, "llama-1": ProcessExit("exited", "status 7")}
    assert not has_ended_well(run)


def test_new_steps_show_that_the_job_goes_on(run_of: Callable[..., CommandRun]) -> None:
    run = run_of(RunEnd.OBSERVED, 20, *STEPS, step(9, 1), step(14, 3), step(15, 4))
    check = goes_on(run)
    assert (check.verdict, check.detail) == (Verdict.PASSED, "2 new steps up to step 4")
    assert not unfinished(run)


def test_a_job_that_stands_still_fails_with_its_empty_places(
    run_of: Callable[..., CommandRun],
) -> None:
    life = {"uid": "u", "container_id": "c"}
    ended = (3, Event.LIFE_ENDED, {**life, "cause": "the pod llama-1 was deleted"})
    run = run_of(RunEnd.STALLED, 23, *STEPS, node1=[(0, Event.LIFE_OBSERVED, life), ended])
    check = goes_on(run)
    assert check.verdict is Verdict.FAILED
    assert "no step was shown for 20 s (stalled_s)" in check.detail
    assert (
        "llama-1 has had no running container for 20 s: the pod llama-1 was deleted" in check.detail
    )
    assert unfinished(run) == [why_standing(run)]


SILENT = (10, Event.MACHINE_SILENT, {"machine": "worker-2"})
SILENCE_ENDED = (15, Event.SILENCE_ENDED, {"machine": "worker-2"})


@pytest.mark.parametrize(
    ("records", "silent_s"),
    [
        ([SILENT], 13),
        ([SILENT, SILENCE_ENDED], None),
        ([SILENT, SILENCE_ENDED, (18, *SILENT[1:])], 5),
        ([SILENT, (24, *SILENCE_ENDED[1:])], 13),  # the fault is undone after the run
    ],
)
def test_a_job_that_stands_still_fails_with_its_silent_machines(
    run_of: Callable[..., CommandRun], records: list[RunEvent], silent_s: int | None
) -> None:
    run = run_of(RunEnd.STALLED, 23, *STEPS, node1=records)
    shown = why_standing(run).partition("(stalled_s)")[2]
    words = f"; the machine worker-2 of llama-1 has been silent for {silent_s} s"
    assert shown == ("" if silent_s is None else words)
    assert goes_on(run).verdict is Verdict.FAILED


def test_a_place_that_was_taken_again_is_not_empty(run_of: Callable[..., CommandRun]) -> None:
    life = {"uid": "u", "container_id": "c"}
    lives = [
        (0, Event.LIFE_OBSERVED, life),
        (3, Event.LIFE_ENDED, {**life, "cause": "the pod llama-1 was deleted"}),
        (5, Event.LIFE_OBSERVED, {**life, "uid": "v"}),
    ]
    assert "llama-1" not in why_standing(run_of(RunEnd.STALLED, 23, *STEPS, node1=lives))


@pytest.mark.parametrize(
    ("later_steps", "verdict"),
    [
        ([], Verdict.FAILED),
        ([step(9, 1), step(10, 2)], Verdict.FAILED),  # it went back, and no further than before
        ([step(9, 3)], Verdict.UNKNOWN),
    ],
)
def test_a_deadline_fails_only_a_job_without_new_steps(
    run_of: Callable[..., CommandRun], later_steps: list[RunEvent], verdict: Verdict
) -> None:
    run = run_of(RunEnd.DEADLINE, 60, *STEPS, *later_steps)
    assert goes_on(run).verdict is verdict


def test_an_aborted_run_is_unknown_with_the_condition(run_of: Callable[..., CommandRun]) -> None:
    check = goes_on(run_of(RunEnd.ABORTED, 3, *STEPS))
    assert (check.verdict, check.detail) == (Verdict.UNKNOWN, "the run was aborted: disk full")


def test_a_hole_counts_where_steps_are_shown(run_of: Callable[..., CommandRun]) -> None:
    def hole(node: str) -> RunEvent:
        fields = {"file": node, "line": 7, "reason": "pod_gone", "pod": node, "container": "train"}
        return 3, Event.LOG_HOLE, fields

    assert not hole_in_steps(run_of(RunEnd.OBSERVED, 20, *STEPS, hole("llama-1")))
    problem = hole_in_steps(run_of(RunEnd.OBSERVED, 20, *STEPS, hole("llama-0")))
    assert problem.startswith("lines of llama-0 may be missing after line 7 of its log: pod_gone")


HAND = {"role": "processes", "uid": "u", "container_id": "c"}


@pytest.mark.parametrize(
    ("records_of_node", "verdicts"),
    [
        ([(3, Event.HAND_ENDED, HAND)], [Verdict.UNKNOWN]),
        ([(1, Event.HAND_ENDED, HAND)], []),  # before the fault
        ([(3, Event.HAND_ENDED, HAND), (4, Event.LIFE_ENDED, {**HAND, "cause": "killed"})], []),
        (
            [(3, Event.HAND_ENDED, HAND), (12, Event.LIFE_ENDED, {**HAND, "cause": "killed"})],
            [Verdict.UNKNOWN],
        ),
    ],
)
def test_a_hand_that_ends_alone_makes_the_run_unknown(
    run_of: Callable[..., CommandRun], records_of_node: list[RunEvent], verdicts: list[Verdict]
) -> None:
    run = run_of(RunEnd.OBSERVED, 20, *STEPS[:2], struck(2.5), step(15, 3), node1=records_of_node)
    assert [check.verdict for check in check_hands(run)] == verdicts


@pytest.mark.parametrize(("ended_s", "verdicts"), [(5, [Verdict.UNKNOWN]), (11, [])])
def test_a_fault_that_ends_a_node_excuses_its_hand_from_the_strike_on(
    tmp_path: Path, ended_s: float, verdicts: list[Verdict]
) -> None:
    faults = (FAULT, DeletePod(rank=1, at_step=3))
    at_s, event, fields = struck(10)
    events = [*STEPS[:2], struck(2.5), (at_s, event, {**fields, "fault": "fault1"})]
    hand_ended = (ended_s, Event.HAND_ENDED, HAND)
    experiment = replace(EXPERIMENT, faults=faults)
    run = recorded_run(tmp_path, experiment, RunEnd.OBSERVED, 20, events, [hand_ended])
    assert [check.verdict for check in check_hands(run)] == verdicts


def test_a_log_that_shows_nothing_proves_nothing(run_of: Callable[..., CommandRun]) -> None:
    assert why_unclear(run_of(RunEnd.STALLED, 20)) == "the log shows no step"


def test_steps_before_the_evidence_are_not_new(run_of: Callable[..., CommandRun]) -> None:
    """A pod that has time to end trains on until it does."""
    evidence = (9, Event.EVIDENCE, {"fault": "fault0", "observed": "gone", "level": "effective"})
    run = run_of(RunEnd.DEADLINE, 60, *STEPS[:2], struck(2.5), step(8, 3), evidence)
    assert goes_on(run).verdict is Verdict.FAILED


def test_faults_take_no_place_for_good(run_of: Callable[..., CommandRun]) -> None:
    assert taken_nodes(run_of(RunEnd.OBSERVED, 20, *STEPS)) == set()


@pytest.mark.parametrize(("late_s", "verdicts"), [(0.4, []), (0.0, [Verdict.ERROR])])
def test_a_step_that_was_read_after_the_strike_was_not_known_then(
    run_of: Callable[..., CommandRun], late_s: float, verdicts: list[Verdict]
) -> None:
    """Step 3 arrived before the strike; the harness has recorded step 2."""
    at_s, event, fields = step(2.8, 3)
    late_step = (at_s, event, {**fields, "late_ns": int(late_s * S)})
    rank = {"rank": 1, "pid": 9, "ticks": 5, "variable": "RANK"}
    ranks = [(0, Event.RANK_FOUND, rank), (3.1, Event.RANK_GONE, rank)]
    ranks.append((3.4, Event.RANK_FOUND, {**rank, "pid": 10, "ticks": 6}))
    at_step_2 = replace(EXPERIMENT, faults=(Kill(rank=1, at_step=2),))
    run = run_of(RunEnd.OBSERVED, 20, step(2, 2), late_step, struck(3), step(5, 4), node1=ranks)
    checks = audit(replace(run, experiment=at_step_2), is_whole=True)
    assert [check.verdict for check in checks] == verdicts, checks


@pytest.mark.parametrize(
    ("waited_for", "verdict"),
    [("", Verdict.ERROR), ("the hand: it did not answer", Verdict.UNKNOWN)],
)
def test_a_fault_that_waited_for_its_node_strikes_late(
    run_of: Callable[..., CommandRun], waited_for: str, verdict: Verdict
) -> None:
    at_s, event, fields = struck(5)
    strike = (at_s, event, {**fields, "step": 4, "waited_for": waited_for})
    rank = {"rank": 1, "pid": 9, "ticks": 5, "variable": "RANK"}
    ranks = [(0, Event.RANK_FOUND, rank), (5.1, Event.RANK_GONE, rank)]
    ranks.append((5.4, Event.RANK_FOUND, {**rank, "pid": 10, "ticks": 6}))
    steps = [step(2, 2), step(3, 3), step(4, 4), strike, step(7, 5)]
    at_step_2 = replace(EXPERIMENT, faults=(Kill(rank=1, at_step=2),))
    run = run_of(RunEnd.OBSERVED, 20, *steps, node1=ranks)
    (check,) = audit(replace(run, experiment=at_step_2), is_whole=True)
    assert check.verdict is verdict
    assert "long after step 2" in check.detail
    assert waited_for in check.detail


@pytest.mark.parametrize(
    ("fault", "found_again_s", "verdicts"),
    [
        (Kill(rank=1, at_step=2), None, [Verdict.UNKNOWN]),
        (Hang(rank=1, at_step=2), None, [Verdict.UNKNOWN]),
        (Straggle(rank=1, at_step=2, how="quota"), None, [Verdict.UNKNOWN]),
        (Hang(rank=1, at_step=2), 8.0, []),
        (DeletePod(rank=1, at_step=2), None, []),  # the place without a container is unknown
    ],
)
def test_a_struck_rank_that_ended_must_be_started_again(
    run_of: Callable[..., CommandRun],
    fault: Fault,
    found_again_s: float | None,
    verdicts: list[Verdict],
) -> None:
    """The launcher has ended the rank, and the log shows steps of the others."""
    rank = {"rank": 1, "pid": 9, "ticks": 5, "variable": "RANK"}
    ranks = [(0, Event.RANK_FOUND, rank), (6.0, Event.RANK_GONE, rank)]
    if found_again_s is not None:
        ranks.append((found_again_s, Event.RANK_FOUND, {**rank, "pid": 10, "ticks": 6}))
    steps = [step(2, 2), struck(3), step(12, 3)]
    run = run_of(RunEnd.OBSERVED, 20, *steps, node1=ranks)
    checks = audit(replace(run, experiment=replace(EXPERIMENT, faults=(fault,))), is_whole=True)
    assert [check.verdict for check in checks] == verdicts, checks
