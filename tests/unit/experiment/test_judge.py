"""The verdict on a run, check by check.

Pure: the journals of a run are written by hand and changed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.whole_run import (
    ENDED,
    FAULT,
    by_time,
    changed,
    experiment_of,
    fields,
    files_of,
    moved,
    record,
    run_of,
    step_of,
    whole_records,
    without,
)

from chaoskit.experiment.judge.judge import judge
from chaoskit.experiment.reference.ending import scalars
from chaoskit.experiment.reference.floor import Floor
from chaoskit.experiment.reference.reference import Reference
from chaoskit.experiment.twin.twin import Twin
from chaoskit.journal import Journals, Record
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.history import History
from chaoskit.runlog.outcome import COMPLETED, RECOVERED, CopyInterval, Outcome, RuleRecord
from chaoskit.vocabulary import Event, Verdict
from chaoskit.wire.messages import EndJob
from faults import Kill, NaN

Lines = list[Record]
WHOLE = whole_records()
TWIN = Twin(
    [5.0, 4.0, 3.0, 2.0],
    "the weights",
    History(WHOLE).samples_digest(),
    run_id="the twin's",
    ending={"model/weight": [0.0, *[1.0] * 9]},
    scalars=scalars(WHOLE),
    state_digest="the state",
)


def judged(
    lines: Lines = WHOLE, twin: Twin | None = None, floor: Floor | None = None, **run: Any
) -> Outcome:
    return judge(run_of(lines, **run), twin, "docker", floor=floor)


def verdict_of(outcome: Outcome, name: str) -> tuple[str, str] | None:
    """Return the verdict and detail of a check; None if there is no such check."""
    verdicts = [
        (check.verdict.value, check.detail) for check in outcome.checks if check.name == name
    ]
    assert len(verdicts) < 2
    return verdicts[0] if verdicts else None


# -- the outcome -----------------------------------------------------------------------------------


def test_a_whole_run_passes() -> None:
    outcome = judged()
    assert outcome.verdict == Verdict.PASSED
    assert outcome.reasons == []
    assert [check.name for check in outcome.checks] == [
        "journals are whole",
        COMPLETED,
        "evidence of Kill(rank=1, at_step=2)",
        RECOVERED,
        "committed steps kept",
        "one committed history",
        "every sample exactly once",
        "no false alarm",
        "final state is finite",
        "properties",
    ]
    assert {check.verdict for check in outcome.checks} == {Verdict.PASSED}
    details = [check.detail for check in outcome.checks[:-1]]
    assert details == [
        "61 records in 7 files",
        "4 steps",
        "pid 101 was killed by SIGKILL",
        "1 recovery",
        "0 lost, beside the step in flight",
        "each step once, with one result on every rank",
        "16 samples in 4 steps",
        "every detection belongs to a fault",
        "1 tensor of weights and optimizer",
    ]


def test_an_outcome_tells_what_the_run_was() -> None:
    outcome = judged(directory=Path("/some/where"))
    facts = {
        name: getattr(outcome, name)
        for name in ("name", "job", "substrate", "nodes", "spares", "seed")
    }
    job = "gpt {'steps': 4}"
    assert facts == {
        "name": "gpt",
        "job": job,
        "substrate": "docker",
        "nodes": 2,
        "spares": 1,
        "seed": 0,
    }
    assert judged(experiment=experiment_of([], steps=None)).job == "gpt"
    assert (outcome.reduction, outcome.directory, outcome.wall_s) == ("exact", "/some/where", 0.078)
    assert outcome.started == "2023-11-14T22:13:19.999+00:00"
    assert outcome.environment == {
        "chaoskit": "1.0",
        "torch": "2.0",
        "python": "3.11",
        "kernel": "6",
        "machine": "a processor",
    }


def test_an_outcome_tells_what_the_run_did() -> None:
    outcome = judged()
    assert [(point.step, point.loss, point.generation) for point in outcome.steps] == [
        (0, 5.0, 1),
        (1, 4.0, 1),
        (2, 3.0, 2),
        (3, 2.0, 2),
    ]
    assert outcome.steps[0].at_s == 0.012
    (fault,) = outcome.faults
    assert [(evidence.level, evidence.at_s, evidence.observed) for evidence in fault.evidence] == [
        ("armed", 0.031, "rank 1 (pid 101) waited in forward of step 2"),
        ("effective", 0.033, "pid 101 was killed by SIGKILL"),
        ("impactful", 0.035, "rank 1 was given up: exited (its latch broke)"),
    ]
    (recovery,) = outcome.recoveries
    assert recovery.seconds == 0.021
    assert outcome.ledger is not None
    assert (outcome.ledger.samples, outcome.ledger.missing) == (16, [])
    assert (outcome.lost_steps, outcome.false_alarms, outcome.not_applied) == (0, 0, {})
    assert (outcome.weights_digest, outcome.twin_weights_digest, outcome.twin_losses) == (
        "the weights",
        None,
        None,
    )
    assert (outcome.hang_limits_ms, outcome.suspects) == ({"forward": 500}, 3)
    assert (outcome.copies, outcome.exposures, outcome.rules_fired) == (None, [], [])
    account = outcome.account
    assert isinstance(account, TimeAccount)
    assert (account.wall_s, account.steps, account.failures) == (0.078, 4, 1)
    assert account.productive_s == pytest.approx(0.03475)


def test_the_last_hang_limits_are_told() -> None:
    limits = record(
        66, "coordinator", Event.HANG_LIMITS, limits_ms={"forward": 700}, longest_ms={}, suspects=4
    )
    outcome = judged(by_time([*WHOLE, limits]))
    assert (outcome.hang_limits_ms, outcome.suspects) == ({"forward": 700}, 4)
    outcome = judged(without(WHOLE, Event.HANG_LIMITS))
    assert (outcome.hang_limits_ms, outcome.suspects) == ({}, 0)


def test_copies_and_rules_are_told() -> None:
    interval = {
        "worker": "node0.0",
        "step": 1,
        "generation": 1,
        "every": 2,
        "step_ms": 10.0,
        "cost_ms": 1.0,
    }
    firing: dict[str, Any] = {"rank": 1, "step": 1, "reason": "no line", "action": "none"}
    rule: dict[str, Any] = {"rule": "quiet", "verdict": "hanging"}
    more = [
        record(25, "node0", Event.COPY_INTERVAL, **interval),
        record(26, "node1", Event.RULE_FIRED, worker="node1.0", **rule, **firing),
    ]
    outcome = judged(by_time([*WHOLE, *more]))
    assert outcome.copies == CopyInterval(steps=2, seconds=0.02)
    assert outcome.rules_fired == [RuleRecord(where="node1.0", at_s=0.026, **rule, **firing)]


def test_times_without_copies_are_told() -> None:
    protected = {"piece": 0, "step": 1, "nodes": ["node0"]}
    more = [
        record(6, "node0", Event.PROTECTED, worker="node0.0", **protected),
        record(6, "node1", Event.PROTECTED, worker="node1.0", **protected | {"piece": 1}),
    ]
    outcome = judged(by_time([*WHOLE, *more]), experiment=experiment_of(memory_copies=1))
    (exposure,) = outcome.exposures
    assert (exposure.begun_s, exposure.fault, exposure.seconds) == (0.031, str(FAULT), None)


def test_settings_are_told_where_they_are_not_the_default() -> None:
    assert judged().settings == {"shards": 2}
    other = experiment_of(max_lost_steps=3, hash_every=7, reference="on", seed=5)
    outcome = judged(experiment=other)
    assert outcome.settings == {"shards": 2, "hash_every": 7, "max_lost_steps": 3}
    assert outcome.seed == 5


def test_the_collector_of_cycles_is_put_back() -> None:
    """The garbage collector is off while the records are read, and restored afterwards."""
    enabled: list[bool] = []

    class Noting(list[Record]):
        def __iter__(self) -> Iterator[Record]:
            enabled.append(gc.isenabled())
            return super().__iter__()

    run = run_of(WHOLE)
    run.__dict__["journals"] = Journals(Noting(WHOLE), files_of(WHOLE))
    assert gc.isenabled()
    judge(run, None, "local")
    assert gc.isenabled()
    assert enabled == [False]
    gc.disable()
    try:
        judge(run_of(WHOLE), None, "local")
        assert not gc.isenabled()
    finally:
        gc.enable()


# -- where a rank was ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "where"),
    [
        ("node1.0", "rank 1 (pid 101) waited in forward of step 2"),
        ("", "rank 1 (pid 101) was alive, about step 2"),
        ("node0.0", "rank 1 (pid 101) was about to be read by node0.0, at step 2"),
    ],
)
def test_a_rank_is_told_where_it_was_struck(waiting: str, where: str) -> None:
    outcome = judged(changed(WHOLE, Event.INJECTED, "harness", fields(waiting=waiting)))
    assert outcome.faults[0].evidence[0].observed == where


def test_a_loss_is_an_impact_of_its_own_fault_only() -> None:
    faults = [FAULT, Kill(rank=0, at_step=3)]
    other = {
        "fault": "fault1",
        "what": "",
        "worker": "node0.1",
        "rank": 1,
        "node": "node0",
        "pid": 102,
        "step": 3,
        "phase": "forward",
    }
    acted = record(66, "harness", Event.INJECTED, **other, waiting="", nodes=[], done_ns=0)
    outcome = judged(by_time([*WHOLE, acted]), experiment=experiment_of(faults))
    assert [[evidence.level for evidence in fault.evidence] for fault in outcome.faults] == [
        ["armed", "effective", "impactful"],
        ["armed"],
    ]


def test_a_fault_that_was_not_felt_is_unknown() -> None:
    outcome = judged(without(WHOLE, Event.DETECTED))
    detail = "pid 101 was killed by SIGKILL; but no loss and no bad numbers followed, as they must"
    verdict = verdict_of(outcome, "evidence of Kill(rank=1, at_step=2)")
    assert verdict is not None
    assert verdict[0] == "unknown"
    assert verdict[1].startswith(detail)
    assert outcome.not_applied == {RECOVERED: "nothing was lost"}
    assert outcome.verdict == Verdict.UNKNOWN
    assert outcome.reasons == [f"evidence of Kill(rank=1, at_step=2): {verdict[1]}"]


def test_a_fault_that_struck_something_else_is_an_error() -> None:
    outcome = judged(changed(WHOLE, Event.HOOK_STOPPED, "node1.0", fields(phase="reduce")))
    verdict = verdict_of(outcome, "Kill(rank=1, at_step=2) struck what was planned")
    assert verdict == ("error", "node1.0 waited in reduce of step 2, not in forward of step 2")
    assert outcome.verdict == Verdict.ERROR


def test_a_harness_that_was_lost_is_an_error() -> None:
    name = "the harness ended in order"
    assert verdict_of(judged(harness_lost=True), name) == (
        "error",
        f"the harness ended early: {ENDED.reason}",
    )
    assert verdict_of(judged(), name) is None


# -- training completed ----------------------------------------------------------------------------

UNSTEPPED = without(without(WHOLE, Event.COMMIT), Event.FINISHED)


@pytest.mark.parametrize(
    ("lines", "run", "found"),
    [
        (
            WHOLE,
            {"end": None, "deadline_passed": True},
            ("failed", "the run did not end within its deadline of 300 s"),
        ),
        (WHOLE, {"end": EndJob(False, "it broke")}, ("failed", "it broke")),
        (WHOLE, {"end": None}, ("passed", "4 steps")),
        (without(WHOLE, Event.COMMIT, "", step=3), {}, ("failed", "3 of 4 steps were finished")),
        ([*WHOLE, *step_of(64, 4, 2, "node0.0")], {}, ("failed", "5 of 4 steps were finished")),
        (UNSTEPPED, {}, ("failed", "0 of 4 steps were finished")),
        (without(WHOLE, Event.FINISHED), {}, ("failed", "no rank recorded its end")),
    ],
)
def test_training_is_complete_with_all_its_steps(
    lines: Lines, run: dict[str, Any], found: tuple[str, str]
) -> None:
    experiment = experiment_of(deadline_s=300.0)
    assert verdict_of(judged(by_time(lines), experiment=experiment, **run), COMPLETED) == found


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (WHOLE, ("passed", "4 steps")),
        ([*WHOLE, *step_of(64, 4, 2, "node0.0")], ("passed", "5 steps")),
        (without(WHOLE, Event.COMMIT, "", step=3), ("failed", "3 of 4 steps were finished")),
    ],
)
def test_training_until_a_goal_may_take_more_steps(lines: Lines, found: tuple[str, str]) -> None:
    experiment = experiment_of(until={"world": 2})
    assert verdict_of(judged(by_time(lines), experiment=experiment), COMPLETED) == found


def test_training_without_a_number_of_steps_takes_one() -> None:
    free = experiment_of([], steps=None)
    assert verdict_of(judged(experiment=free), COMPLETED) == ("passed", "4 steps")
    assert verdict_of(judged(UNSTEPPED, experiment=free), COMPLETED) == (
        "failed",
        "no step was finished",
    )


# -- recovered -------------------------------------------------------------------------------------

LOST = without(without(WHOLE, Event.PLAN, "", generation=2), Event.COMMIT, "", generation=2)
NOT_RECOVERED = "no step was finished by a new membership after 1 of 1 incident"


def test_a_loss_without_a_new_membership_is_no_recovery() -> None:
    assert verdict_of(judged(LOST, end=None), RECOVERED) == ("failed", NOT_RECOVERED)
    assert verdict_of(judged(LOST, end=EndJob(False, "it broke")), RECOVERED) == (
        "failed",
        NOT_RECOVERED,
    )


def test_a_loss_in_the_last_step_needs_no_recovery() -> None:
    """The job ended well; every step committed after the loss has a contribution of the
    lost rank.
    """
    assert verdict_of(judged(LOST), RECOVERED) == ("passed", "0 recoveries")
    alone = step_of(50, 2, 1, "node0.0")
    assert verdict_of(judged(by_time([*LOST, *alone])), RECOVERED) == ("failed", NOT_RECOVERED)
    before = step_of(20, 2, 1, "node0.0")
    assert verdict_of(judged(by_time([*LOST, *before])), RECOVERED) == ("passed", "0 recoveries")
    at_once = step_of(33, 2, 1, "node0.0")
    assert verdict_of(judged(by_time([*LOST, *at_once])), RECOVERED) == ("passed", "0 recoveries")
    contributed = [
        *alone,
        record(30.5, "node1.0", Event.REDUCE, **step_of(0, 2, 1, "node0.0", "node1.0")[2].fields),
    ]
    assert verdict_of(judged(by_time([*LOST, *contributed])), RECOVERED) == (
        "passed",
        "0 recoveries",
    )


def test_a_rank_that_gave_nothing_is_missed_in_every_step() -> None:
    lines = by_time([*without(LOST, Event.REDUCE, "node1.0"), *step_of(50, 0, 1, "node0.0")])
    assert verdict_of(judged(lines), RECOVERED) == ("failed", NOT_RECOVERED)


def test_bad_numbers_need_no_new_membership() -> None:
    """The step is computed again by the same ranks."""
    fields_of_report = {"worker": "node1.0", "step": 2, "shards": [1], "owner": 1}
    lines = by_time(
        [
            *without(LOST, Event.DETECTED),
            record(35, "node0.0", Event.NONFINITE, **fields_of_report),
            *step_of(50, 2, 1, "node0.0"),
        ]
    )
    experiment = experiment_of([NaN(rank=1, at_step=2)])
    assert verdict_of(judged(lines, experiment=experiment), RECOVERED) == ("passed", "0 recoveries")


@pytest.mark.parametrize(("by_ms", "seconds"), [(-30, "-0.009"), (-21, "0.000")])
def test_a_recovery_that_ended_before_its_fault_is_an_error(by_ms: float, seconds: str) -> None:
    """A recovery before its fault shows that the clocks of two processes differ."""
    commits = [line for line in WHOLE if line.event == Event.COMMIT and line["generation"] == 2]
    lines = [*without(WHOLE, Event.COMMIT, "", generation=2), *map(moved(by_ms), commits)]
    outcome = judged(by_time(lines))
    verdict = verdict_of(outcome, "times are in order")
    assert verdict == ("error", f"a recovery of {seconds} s: clocks of processes differ")
    assert verdict_of(judged(), "times are in order") is None


# -- steps -----------------------------------------------------------------------------------------

#: Step 0 is committed in both memberships, although a rank that had committed it goes on.
AGAIN = by_time([*WHOLE, *step_of(41, 0, 2, "node0.0", "node0.1")])
KEPT = "committed steps kept"


@pytest.mark.parametrize(("most", "verdict"), [(0, "failed"), (1, "passed"), (2, "passed")])
def test_lost_steps_are_counted(most: int, verdict: str) -> None:
    outcome = judged(AGAIN, experiment=experiment_of(max_lost_steps=most))
    failed = f"1 committed steps were lost and computed again, max_lost_steps={most}"
    detail = failed if verdict == "failed" else "1 lost, beside the step in flight"
    assert verdict_of(outcome, KEPT) == (verdict, detail)
    assert outcome.lost_steps == 1


def test_steps_that_a_torn_world_lost_are_told() -> None:
    interval = {"step": 1, "generation": 1, "every": 3, "step_ms": 10.0, "cost_ms": 1.0}
    torn = [
        record(4.5, worker.partition(".")[0], Event.COPY_INTERVAL, worker=worker, **interval)
        for worker in ("node0.0", "node1.0")
    ]
    torn += [
        record(34, worker.partition(".")[0], Event.TORN, worker=worker, step=2, generation=1)
        for worker in ("node0.0", "node1.0")
    ]
    again = [*step_of(41, 0, 2, "node0.0", "node0.1"), *step_of(43, 1, 2, "node0.0", "node0.1")]
    outcome = judged(by_time([*WHOLE, *torn, *again]))
    detail = "0 lost, beside the step in flight; 2 in an update in which every rank ended"
    assert verdict_of(outcome, KEPT) == ("passed", detail)


def test_no_step_is_no_history() -> None:
    outcome = judged(UNSTEPPED)
    unknown = ("unknown", "there was no data to check")
    assert verdict_of(outcome, KEPT) == unknown
    assert verdict_of(outcome, "one committed history") == unknown
    assert verdict_of(outcome, "every sample exactly once") == unknown


def finished_with(**values: str) -> Lines:
    """Return the records, with another end of one rank."""
    return changed(WHOLE, Event.FINISHED, "node0.1", fields(**values))


@pytest.mark.parametrize(
    ("lines", "detail"),
    [
        (finished_with(weights_digest="others"), "ranks ended with 2 different sets of weights"),
        (
            finished_with(state_digest="another"),
            "ranks ended with 2 different states of the optimizer",
        ),
        (
            finished_with(weights_digest="others", state_digest="another"),
            "ranks ended with 2 different sets of weights",
        ),
        (without(WHOLE, Event.COMMIT, "", step=1), "step 1 is missing"),
    ],
)
def test_a_history_is_one_line(lines: Lines, detail: str) -> None:
    assert verdict_of(judged(lines), "one committed history") == ("failed", detail)


def test_a_step_that_is_committed_again_may_be_rounded_otherwise_in_another_order_of_sums() -> None:
    other = [
        fields(grad_sum=9)(line) if line.event == Event.COMMIT else line
        for line in step_of(41, 1, 2, "node0.0")
    ]
    lines = by_time([*WHOLE, *other])
    detail = "step 1 was committed with 2 different results"
    assert verdict_of(judged(lines), "one committed history") == ("failed", detail)
    fast = verdict_of(
        judged(lines, experiment=experiment_of(reduction="fast")), "one committed history"
    )
    assert fast is not None
    assert fast[0] == "passed"


SAMPLES = "every sample exactly once"


def test_samples_are_those_of_the_unbroken_run() -> None:
    assert verdict_of(judged(twin=TWIN), SAMPLES) == ("passed", "16 samples in 4 steps")
    other = msgspec.structs.replace(TWIN, samples_digest="others")
    detail = "other samples, or another order, than the unbroken run"
    assert verdict_of(judged(twin=other), SAMPLES) == ("failed", detail)


def test_shards_that_are_missing_or_come_twice_are_named() -> None:
    """The comparison with the unbroken run adds nothing to that."""
    other = msgspec.structs.replace(TWIN, samples_digest="others")
    missing = without(WHOLE, Event.REDUCE, "node0.0", step=3)
    assert verdict_of(judged(missing, other), SAMPLES) == ("failed", "missing: step 3 shard 0")
    twice = [
        fields(shards=[0])(line) if line.event == Event.REDUCE and line["step"] == 3 else line
        for line in WHOLE
    ]
    verdict = verdict_of(judged(twice, other), SAMPLES)
    assert verdict == ("failed", "missing: step 3 shard 1; repeated: step 3 shard 0")


# -- comparisons -----------------------------------------------------------------------------------


def test_a_twin_is_compared() -> None:
    outcome = judged(twin=TWIN)
    assert verdict_of(outcome, "losses equal the twin's") == ("passed", "4 losses, bit for bit")
    assert (outcome.twin_losses, outcome.twin_weights_digest) == (
        [5.0, 4.0, 3.0, 2.0],
        "the weights",
    )


def test_a_reference_that_was_asked_for_is_missing() -> None:
    run = run_of(WHOLE, experiment=experiment_of(reference="on"))
    assert judge(run, None, "local").verdict == Verdict.UNKNOWN
    other = judge(run, None, "local", Reference(run_id="this run", losses=[5.0]))
    assert verdict_of(other, "the reference is another run") == (
        "error",
        "both have the run id this run",
    )


FAST = experiment_of(reduction="fast")
PROMISED = changed(WHOLE, Event.STARTED, "harness", fields(twin="the twin's"))
NO_FLOOR = "floor.json: the distance between the ends of correct runs is missing; see floor.log"
FLOOR = Floor(reason="none was asked for")


@pytest.mark.parametrize(
    ("lines", "twin", "floor", "run", "lacks"),
    [
        (PROMISED, TWIN, None, {"experiment": FAST}, True),
        (WHOLE, TWIN, None, {"experiment": FAST}, False),
        (PROMISED, None, None, {"experiment": FAST}, False),
        (PROMISED, TWIN, FLOOR, {"experiment": FAST}, False),
        (PROMISED, TWIN, None, {"experiment": FAST, "end": None}, False),
        (PROMISED, TWIN, None, {"experiment": FAST, "end": EndJob(False, "")}, False),
        (PROMISED, TWIN, None, {}, False),
    ],
)
def test_a_floor_is_missing_where_sums_have_no_order(
    lines: Lines, twin: Twin | None, floor: Floor | None, run: dict[str, Any], lacks: bool
) -> None:
    """A run that ended well and has a twin is compared within a floor."""
    verdict = verdict_of(judged(lines, twin, floor, **run), "journals are whole")
    assert verdict is not None
    assert (NO_FLOOR in verdict[1]) == lacks


# -- alarms ----------------------------------------------------------------------------------------

ALARM = record(
    55, "coordinator", Event.DETECTED, worker="node0.1", rank=1, cause="slow", detail="too slow"
)


def test_a_loss_that_no_fault_explains_is_a_false_alarm() -> None:
    outcome = judged(by_time([*WHOLE, ALARM]))
    assert verdict_of(outcome, "no false alarm") == ("failed", "node0.1: slow (too slow)")
    assert outcome.false_alarms == 1
    assert outcome.account is not None
    assert "slow" not in outcome.account.lost_s


def test_without_records_of_a_coordinator_no_alarm_is_known() -> None:
    files = {source: file for source, file in files_of(WHOLE).items() if source != "coordinator"}
    verdict = verdict_of(judged(files=files), "no false alarm")
    assert verdict == ("unknown", "there was no data to check")


def raised(worker: str, detail: str = "ValueError: no") -> Lines:
    """Return the records of a worker with a job that has raised an exception."""
    return [
        record(54, worker, Event.FAILED, error=detail, traceback=""),
        record(
            55, "coordinator", Event.DETECTED, worker=worker, rank=1, cause="raised", detail=detail
        ),
    ]


def test_an_exception_of_the_job_is_told_with_its_workers() -> None:
    name = "no exception in the job"
    both = by_time([*WHOLE, *raised("node0.0"), *raised("node0.1")])
    assert verdict_of(judged(both), name) == ("failed", "node0.0, node0.1: ValueError: no")
    different = by_time([*WHOLE, *raised("node0.0"), *raised("node0.1", "KeyError")])
    assert verdict_of(judged(different), name) == (
        "failed",
        "node0.0: ValueError: no; node0.1: KeyError",
    )
    assert verdict_of(judged(different), "no false alarm") == (
        "passed",
        "every detection belongs to a fault",
    )
    assert verdict_of(judged(), name) is None


def test_an_exception_that_ended_the_run_is_told_once() -> None:
    """The check of the training names it; a run without an end names nothing."""
    name = "no exception in the job"
    lines = by_time([*WHOLE, *raised("node0.0")])
    assert verdict_of(judged(lines, end=EndJob(False, "rank 0: ValueError: no")), name) is None
    assert verdict_of(judged(lines, end=None), name) == ("failed", "node0.0: ValueError: no")


# -- what a node took with it ----------------------------------------------------------------------


def test_what_went_with_a_node_is_unknown() -> None:
    lines = without(WHOLE, Event.REDUCE, "node0.0", step=3)
    assert judged(lines).verdict == Verdict.FAILED
    cut = [*lines, record(79, "harness", Event.RECORDS_CUT, node="node0")]
    outcome = judged(cut)
    detail = "missing: step 3 shard 0; the last records of node0 were lost"
    assert verdict_of(outcome, SAMPLES) == ("unknown", detail)
    assert outcome.verdict == Verdict.UNKNOWN
