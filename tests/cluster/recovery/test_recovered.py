"""A run that recovered counts as recovered, whatever else failed; the result of its test is a
number of its own.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runs import run as recorded

from chaoskit.experiment.plan.planfile import FILE_NAME
from chaoskit.history import record
from chaoskit.history.compare import compare, samples_of
from chaoskit.history.finding import NumberChange
from chaoskit.history.place import Sources
from chaoskit.history.record import Metric, RunRecord, metrics_of
from chaoskit.history.session import read, records_of
from chaoskit.report.statistics import estimate_recovery
from chaoskit.report.summary import recovery_sentence
from chaoskit.runlog.outcome import (
    COMPLETED,
    RECOVERED,
    Check,
    FaultRecord,
    Ledger,
    Outcome,
    Recovery,
    TestResult,
)
from chaoskit.sla.language import parse
from chaoskit.vocabulary import Verdict

KILL = "Kill(rank=1, at_step=8)"
UNFAITHFUL = Path(__file__).parents[2] / "jobs" / "wrong" / "unfaithful.py"


def outcome(
    verdict: Verdict = Verdict.PASSED,
    recovered: Verdict | None = Verdict.PASSED,
    *,
    completed: Verdict = Verdict.PASSED,
    seconds: float = 0.5,
    test: str = "",
) -> Outcome:
    """Return the outcome of a run with one fault.

    Args:
        recovered: verdict of the check of recovery; None leaves the check out.
    """
    checks = [Check(name=COMPLETED, verdict=completed, detail="")]
    checks += [] if recovered is None else [Check(name=RECOVERED, verdict=recovered, detail="")]
    recovery = Recovery(
        cause="rank 1: killed",
        fault=KILL,
        injected_s=1.0,
        generation=2,
        world=2,
        spans=[],
        seconds=seconds,
        full_strength_seconds=None,
        step_seconds=0.1,
    )
    return Outcome(
        name="kill",
        job="gpt",
        substrate="local",
        nodes=2,
        spares=1,
        seed=0,
        reduction="exact",
        started="2026-03-02T10:15:00+00:00",
        wall_s=1.0,
        verdict=verdict,
        reasons=[] if verdict is Verdict.PASSED else ["losses equal the twin's: they differ"],
        steps=[],
        faults=[FaultRecord(fault=KILL, kind="Kill")],
        recoveries=[recovery] if recovered is Verdict.PASSED else [],
        checks=checks,
        ledger=Ledger(steps=0, samples=0),
        lost_steps=0,
        test=TestResult(nodeid="test_kill", failed=bool(test), message=test),
    )


# -- one run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "check", "completed", "recovered"),
    [
        (Verdict.PASSED, Verdict.PASSED, Verdict.PASSED, True),
        (
            Verdict.FAILED,
            Verdict.PASSED,
            Verdict.PASSED,
            True,
        ),  # its losses differ, or a property is violated
        (
            Verdict.FAILED,
            Verdict.PASSED,
            Verdict.FAILED,
            True,
        ),  # it came back, and passed its deadline later
        (Verdict.FAILED, Verdict.FAILED, Verdict.FAILED, False),
        (
            Verdict.FAILED,
            Verdict.UNKNOWN,
            Verdict.PASSED,
            None,
        ),  # the log of a command shows no step
        (Verdict.PASSED, None, Verdict.PASSED, True),  # nothing was lost
        (Verdict.FAILED, None, Verdict.FAILED, False),
        (Verdict.FAILED, None, Verdict.PASSED, True),
        (Verdict.UNKNOWN, Verdict.PASSED, Verdict.PASSED, None),  # a fault has left no evidence
        (Verdict.ERROR, Verdict.PASSED, Verdict.PASSED, None),
    ],
)
def test_a_run_recovered_if_its_checks_of_recovery_passed(
    verdict: Verdict, check: Verdict | None, completed: Verdict, recovered: bool | None
) -> None:
    run = outcome(verdict, check, completed=completed)
    assert run.recovered is recovered
    measured = metrics_of(run).get("recovered")
    assert (None if measured is None else bool(measured.value)) is recovered


@pytest.mark.parametrize(
    "limits",
    [{"within_s": 0.1}, {"within_s": 1.0, "bit_equal": True}],
    ids=["too slow", "not the twin's"],
)
def test_a_run_has_not_recovered_if_assert_recovered_says_so(limits: dict[str, Any]) -> None:
    """A run that misses the limits of `assert_recovered` has not recovered.

    It came back all the same, so its recovery time is measured.
    """
    run = outcome(seconds=0.5)
    with suppress(AssertionError):
        run.assert_recovered(**limits)
    assert (run.recovered, run.came_back) == (False, True)
    assert metrics_of(run)["recovered"].value == 0.0
    assert "kill" in run.not_recovered
    stored = msgspec.json.decode(msgspec.json.encode(run), type=Outcome)
    assert stored.recovered is False


def test_a_history_counts_the_same_recoveries_as_a_report(tmp_path: Path) -> None:
    """A run counts as a recovery although it failed for another reason and its test wants it
    sooner.
    """
    runs = [
        outcome(Verdict.FAILED, seconds=0.5),
        outcome(Verdict.FAILED, Verdict.FAILED),
        outcome(Verdict.UNKNOWN),
    ]
    with suppress(AssertionError):
        runs[0].assert_recovered(within_s=0.1)
    (tmp_path / FILE_NAME).write_text("{}")
    sources = Sources(root=tmp_path)
    records = [
        records_of(msgspec.structs.replace(run, directory=str(tmp_path)), sources)[0]
        for run in runs
    ]
    stored = [msgspec.json.decode(msgspec.json.encode(run), type=RunRecord) for run in records]
    assert [record.came_back(run) for run in stored] == [True, False, False]
    assert estimate_recovery(runs).total.recoveries == len(samples_of(stored, record.RECOVERY)) == 1


def test_an_assertion_of_the_test_about_something_else_says_nothing_of_recovery() -> None:
    run = outcome(test="AssertionError: the model is too bad")
    assert run.recovered is True
    assert run.result is Verdict.FAILED
    measured = metrics_of(run)
    assert (measured["recovered"].value, measured["passed"].value) == (1.0, 0.0)


# -- report and summary ----------------------------------------------------------------------------


def test_the_probability_counts_recoveries_and_failures_stand_beside_it() -> None:
    runs = [
        outcome(seconds=0.1),
        outcome(Verdict.FAILED, seconds=0.2),
        outcome(seconds=0.3, test="AssertionError: no"),
        outcome(Verdict.FAILED, Verdict.FAILED),
        outcome(Verdict.UNKNOWN),
    ]
    total = estimate_recovery(runs).total
    assert (total.recovered, total.tried, total.failed, total.unknown, total.runs) == (
        3,
        4,
        3,
        1,
        5,
    )
    assert (total.recoveries, total.max_s) == (3, 0.3)
    assert recovery_sentence(total).startswith("recovered in 3 of 4 runs: 75 %")
    assert recovery_sentence(total).endswith("; 3 failed; 1 unknown")


# -- history and SLAs ------------------------------------------------------------------------------


def failed_otherwise(**changes: Any) -> RunRecord:
    """Return the record of a run that recovered, and failed for a reason that no other metric
    counts.
    """
    record: RunRecord = recorded(verdict=Verdict.FAILED, **changes)
    record.metrics["recovered"] = Metric(1.0, "count", "higher")
    record.metrics["passed"] = Metric(0.0, "count", "higher")
    return record


def test_a_run_that_fails_for_another_reason_than_before_is_worse_once() -> None:
    before = [recorded() for _ in range(6)]
    comparison = compare(before, [*before[:5], failed_otherwise()])
    worse = [finding for finding in comparison.findings if finding.change is NumberChange.REGRESSED]
    assert [finding.metric for finding in worse] == ["passed"]
    recovered = next(finding for finding in comparison.findings if finding.metric == "recovered")
    assert recovered.change is NumberChange.UNCHANGED


@pytest.mark.parametrize("missed", [{"losses_equal": 0}, {"false_alarms": 1}], ids=str)
def test_a_reason_that_is_counted_by_itself_is_worse_once(missed: dict[str, int]) -> None:
    before = [recorded() for _ in range(6)]
    comparison = compare(before, [*before[:5], failed_otherwise(**missed)])
    worse = [
        finding.metric
        for finding in comparison.findings
        if finding.change is NumberChange.REGRESSED
    ]
    assert worse == [*missed]


def test_records_without_a_result_are_compared_by_their_verdict() -> None:
    """Records of earlier versions count a failed run as not recovered."""
    old = [recorded() for _ in range(6)]
    comparison = compare(old, [*old[:5], failed_otherwise()])
    assert comparison.is_regressed
    was_failed = [recorded(verdict=Verdict.FAILED) for _ in range(6)]
    assert not compare(was_failed, was_failed).is_regressed


def test_how_long_a_recovery_took_counts_also_where_the_run_failed_for_another_reason() -> None:
    lost = recorded(0.9, verdict=Verdict.FAILED)
    assert samples_of([recorded(0.5), failed_otherwise(recovery_s=0.7), lost], record.RECOVERY) == [
        0.5,
        0.7,
    ]


def test_lines_of_an_sla_count_recoveries_and_results() -> None:
    run = failed_otherwise(recovery_s=0.7)
    assert parse("recovered", "always").holds(run) is True
    assert parse("passed", "always").holds(run) is False
    assert parse("recovery.p95 <= 1 s", "objectives").holds(run) is True
    assert (
        parse("recovery.p95 <= 1 s", "objectives").holds(recorded(0.7, verdict=Verdict.FAILED))
        is False
    )


# -- a session -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.costly
def test_a_session_tells_recoveries_and_results_apart(pytester: pytest.Pytester) -> None:
    """A session counts a run that differs from its twin, and a run that its test wants sooner, as
    recovered and failed.
    """
    pytester.makeini("[pytest]\nchaos_detection = relaxed\n")
    pytester.makepyfile(
        test_session=f"""
        from faults import Kill

        JOBS = {str(UNFAITHFUL)!r}
        PLAN = {{"nodes": 2, "steps": 20, "faults": [Kill(rank=1, at_step=8)]}}

        def test_differs(chaos):
            chaos.run(JOBS + ":remembers_its_process", **PLAN)

        def test_slow(chaos):
            chaos.run(JOBS + ":faithful", **PLAN).assert_recovered(within_s=1e-6)

        def test_good(chaos):
            chaos.run(JOBS + ":faithful", **PLAN).assert_recovered(within_s=60)
        """
    )
    options = ("--chaos-report", "report", "--chaos-history", "history", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["recovered in 2 of 3 runs: 66.67 %*; 2 failed"])
    runs = {run.title.partition("::")[2]: run for run in read(str(pytester.path / "history")).runs}
    values = {
        name: (run.metrics["recovered"].value, run.metrics["passed"].value)
        for name, run in runs.items()
    }
    assert values == {"test_differs": (1.0, 0.0), "test_slow": (0.0, 0.0), "test_good": (1.0, 1.0)}
    assert [name for name, run in runs.items() if run.test_failed] == ["test_slow"]
    listed = pytester.run("chaoskit", "history", "list", "history", "--json")
    by_test = {line["title"].partition("::")[2]: line for line in json.loads(listed.stdout.str())}
    assert (by_test["test_differs"]["recovered"], by_test["test_differs"]["passed"]) == (1, 0)
