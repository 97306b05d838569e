"""Edge cases of a history's decisions: which numbers are measured, kept, compared and accepted."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from datetime import UTC, date, datetime, timedelta
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.runs import run
from unit.report.test_report import failed, outcome, passed

from chaoskit.history.compare import (
    CONTROL,
    TOLERANCE,
    RunComparison,
    compare,
    compare_number,
    exit_code,
    is_conclusive,
    judge,
    samples_of,
    with_accepted,
    with_accepted_findings,
    withdraw_chance_regressions,
)
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.place import Sources, covariates_of, machine_of, sources_at
from chaoskit.history.ratio_estimate import EXACT_MOST, RatioEstimate, estimate_ratio
from chaoskit.history.record import (
    AcceptedRecord,
    Metric,
    NightRecord,
    RunRecord,
    came_back,
    metrics_of,
)
from chaoskit.history.record import passed as run_passed
from chaoskit.history.rendering import markdown, ratio_text, sparkline, top_changes, value_text
from chaoskit.history.series import series_of
from chaoskit.history.session import SessionRecords, lines_of, read, records_of
from chaoskit.history.store import RunContents, RunHistory, encode
from chaoskit.report.store import write_outcome
from chaoskit.runlog.account.time_account import TimeAccount
from chaoskit.runlog.outcome import Check, Exposure, Outcome, TestResult
from chaoskit.vocabulary import Verdict

TODAY = date(2026, 11, 28)


# -- what a run has measured -----------------------------------------------------------------------


def _account(**seconds: float) -> TimeAccount:
    """Return the account of a run in which nothing else took time."""
    fields = {
        name: seconds.get(name, 0.0)
        for name in TimeAccount.__struct_fields__
        if name.endswith("_s")
    }
    return TimeAccount(**fields | {"recovery_s": {}, "lost_s": {}}, failures=0, steps=1)


def test_numbers_of_a_run_that_recovered() -> None:
    made = passed()
    made.checks.append(Check(name="losses equal the twin's", verdict=Verdict.PASSED, detail=""))
    made.exposures = [
        Exposure(fault=None, begun_s=1.0, seconds=seconds, pieces=[])
        for seconds in (0.5, None, 2.5)
    ]
    made.account = _account(wall_s=10.0, productive_s=6.0, stalled_s=1.5)
    slowest = max(made.recoveries, key=lambda recovery: recovery.seconds)
    values = {name: metric.value for name, metric in metrics_of(made).items()}
    assert len(made.recoveries) == 3
    assert values["recovered"] == values["passed"] == values["losses_equal"] == 1.0
    assert values["recovery"] == slowest.seconds
    assert values["step"] == slowest.step_seconds
    assert values["full_strength"] == slowest.full_strength_seconds
    assert values["bound"] == sum(span.reference_s for span in slowest.spans)
    assert values["recovery.first_good_step"] == next(
        span.seconds for span in slowest.spans if span.name == "first good step"
    )
    assert values["exposure"] == 2.5
    assert (values["goodput"], values["ettr"]) == (0.6, 0.75)
    assert (values["lost_steps"], values["false_alarms"]) == (0, 0)
    assert metrics_of(made)["recovery"] == Metric(slowest.seconds, "s", "lower")


def test_numbers_of_a_run_without_a_fault() -> None:
    """The step is the median of all steps but the first, of those that took time."""
    made = outcome("calm", count=5)
    made.steps = [
        msgspec.structs.replace(point, seconds=seconds)
        for point, seconds in zip(made.steps, (9.0, 0.1, 0.3, 0.2, 0.0), strict=True)
    ]
    values = {name: metric.value for name, metric in metrics_of(made).items()}
    assert values["step"] == 0.2
    assert not {"recovery", "bound", "full_strength", "exposure", "goodput"} & {*values}


@pytest.mark.parametrize(
    ("verdict", "test_failed", "number"),
    [
        (Verdict.PASSED, False, 1.0),
        (Verdict.PASSED, True, 0.0),
        (Verdict.FAILED, False, 0.0),
        (Verdict.UNKNOWN, False, None),
        (Verdict.ERROR, True, None),
    ],
)
def test_whether_a_run_passed_is_known_of_a_verdict_alone(
    verdict: Verdict, test_failed: bool, number: float | None
) -> None:
    made = outcome("x", verdict=verdict, test=TestResult(nodeid="x", failed=test_failed))
    metric = metrics_of(made).get("passed")
    assert (metric.value if metric else None) == number


@pytest.mark.parametrize(
    ("verdict", "number"), [(Verdict.PASSED, 1.0), (Verdict.FAILED, 0.0), (Verdict.UNKNOWN, None)]
)
def test_losses_that_were_not_compared_are_no_number(
    verdict: Verdict, number: float | None
) -> None:
    made = outcome("x", checks=[Check(name="losses equal the twin's", verdict=verdict, detail="")])
    metric = metrics_of(made).get("losses_equal")
    assert (metric.value if metric else None) == number


def _planned(made: Outcome, directory: Path) -> Outcome:
    plan = {
        "version": 2,
        "job": "gpt",
        "steps": 5,
        "settings": {"nodes": 2},
        "faults": [{"kind": "Kill", "rank": 1}],
    }
    (directory / "plan.json").write_text(json.dumps(plan))
    made.directory = str(directory)
    return made


def test_a_record_tells_of_the_run_and_of_its_test(tmp_path: Path) -> None:
    made = _planned(outcome("test_x #2", verdict=Verdict.PASSED, run_id="a-run"), tmp_path)
    sources = Sources(root=tmp_path, commit="c0ffee")
    record, shared = records_of(made, sources, "a.py::test_x")
    assert (record.run_id, record.commit, record.title) == ("a-run", "c0ffee", "a.py::test_x #2")
    assert (record.test_failed, record.came_back, record.claimed) == (False, True, True)
    assert record.started_unix_ns == int(datetime(2026, 3, 2, 10, 15, tzinfo=UTC).timestamp() * 1e9)
    assert record.faults == ["Kill"]
    assert shared.series == record.series
    assert shared.plan["job"] == "gpt"
    made.test = TestResult(nodeid="b.py::test_y", failed=True)
    made.started = "no time"
    record, _ = records_of(made, sources)
    assert (record.test_failed, record.title, record.started_unix_ns) == (
        True,
        "b.py::test_y #2",
        0,
    )
    assert [json.loads(line)["kind"] for line in lines_of([made], sources, "x")] == [
        "run",
        "series",
    ]
    assert lines_of([outcome("without a plan")], sources, "x") == []


def test_what_a_run_depends_on() -> None:
    made = outcome("x", settings={"device": "cuda"})
    made.environment["machine"] = "a processor, 4 cores"
    assert machine_of(made) == "a processor, 4 cores, cuda, local"
    here, elsewhere = Sources(root=Path(), commit="a", is_changed=True), Sources(root=Path())
    assert covariates_of(made, here)["sources"] == "changed"
    assert "load" in covariates_of(made, here)
    assert "load" not in covariates_of(made, elsewhere)
    assert covariates_of(made, elsewhere)["torch"] == "2.9.1"


def test_a_directory_has_the_commit_of_its_repository_if_there_is_one(tmp_path: Path) -> None:
    """A repository without a commit does not count: git then answers with the words of the
    question.
    """
    assert sources_at(tmp_path) == Sources(root=tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    (tmp_path / "below").mkdir()
    assert sources_at(tmp_path / "below") == Sources(root=tmp_path / "below")
    (tmp_path / "below" / "train.py").touch()
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "a job"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert sources_at(tmp_path / "below") == Sources(root=tmp_path, commit=commit)
    (tmp_path / "below" / "other.py").touch()  # not a file of the commit
    assert not sources_at(tmp_path).is_changed
    (tmp_path / "below" / "train.py").write_text("changed = True\n")
    assert sources_at(tmp_path).is_changed


@pytest.mark.parametrize(
    ("more", "is_back", "is_passed"),
    [
        ({}, True, True),
        ({"verdict": Verdict.FAILED}, False, False),
        ({"verdict": Verdict.FAILED, "came_back": True}, True, False),
        ({"came_back": False}, False, True),
        ({"verdict": Verdict.UNKNOWN}, False, False),
    ],
)
def test_records_of_earlier_versions_say_less(
    more: dict[str, Any], is_back: bool, is_passed: bool
) -> None:
    made = run(**more)
    assert came_back(made) is is_back
    assert run_passed(made) is is_passed
    counted = msgspec.structs.replace(
        made, metrics={**made.metrics, "passed": Metric(0.0, "count", "higher")}
    )
    assert run_passed(counted) is False


# -- series ----------------------------------------------------------------------------------------


def test_places_in_plans_are_those_of_every_run() -> None:
    root = Path("/work/project")

    def series(place: str) -> str:
        return series_of(outcome("x"), {"job": "gpt", "options": {"data": place}}, root)

    temporary = tempfile.gettempdir()
    assert series(f"{temporary}/a/b") == series(f"{temporary}/c/d")
    assert series(f"{temporary}/a") != series("/data/a")
    assert series("/data/a") == series("/other/a")
    assert series("/data/a") != series("/data/b")
    assert series("/work/project/x/a") != series("/work/project/y/a")


# -- ranks -----------------------------------------------------------------------------------------


def test_large_samples_are_judged_as_small_ones() -> None:
    """Large samples are judged with a normal distribution; both methods agree at the border."""
    chance = random.Random(1)
    early = [chance.lognormvariate(0, 0.2) for _ in range(EXACT_MOST)]
    late = [chance.lognormvariate(0.1, 0.2) for _ in range(EXACT_MOST)]
    exact = estimate_ratio(early, late, 0.9)
    normal = estimate_ratio([*early, sorted(early)[15]], [*late, sorted(late)[15]], 0.9)
    assert normal.low == pytest.approx(exact.low, rel=0.02)
    assert normal.high == pytest.approx(exact.high, rel=0.02)
    assert normal.greater == pytest.approx(exact.greater, rel=0.4)
    assert normal.smaller == pytest.approx(exact.smaller, rel=0.4)
    assert exact.low < exact.ratio < exact.high
    assert estimate_ratio(early, early, 0.9).ratio == 1.0


def test_equal_values_and_few_values_show_nothing() -> None:
    equal = estimate_ratio([1.0] * 5, [1.0] * 5, 0.9)
    assert (equal.ratio, equal.low, equal.high) == (1.0, 1.0, 1.0)
    assert equal.greater == equal.smaller > 0.4
    two, three = ([1.0 + 0.01 * number for number in range(count)] for count in (2, 3))
    assert (estimate_ratio(two, two, 0.9).low, estimate_ratio(two, two, 0.9).high) == (0, inf)
    bounded = estimate_ratio(
        three, three, 0.9
    )  # of three values a side, only the outermost pairs can bound the ratio
    assert (bounded.low, bounded.high) == (pytest.approx(1 / 1.02), pytest.approx(1.02))


@pytest.mark.parametrize(
    ("early", "late"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [inf])]
)
def test_samples_that_cannot_be_compared_are_refused(early: list[float], late: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sample is empty|above 0"):
        estimate_ratio(early, late)


def _ratio(
    value: float, *, greater: float = 0.5, smaller: float = 0.5, high: float = 9.0
) -> RatioEstimate:
    return RatioEstimate(
        ratio=value, low=0.1, high=high, greater=greater, smaller=smaller, before=9, after=9
    )


@pytest.mark.parametrize(
    ("ratio", "change"),
    [
        (_ratio(1.25, greater=0.005), NumberChange.REGRESSED),
        (_ratio(1.24, greater=0.005), NumberChange.UNDECIDED),
        (_ratio(1.25, greater=0.006), NumberChange.UNDECIDED),
        (_ratio(0.8, smaller=0.005), NumberChange.BETTER),
        (_ratio(0.81, smaller=0.005), NumberChange.UNDECIDED),
        (_ratio(0.8, smaller=0.006), NumberChange.UNDECIDED),
        (_ratio(1.0, high=1.24), NumberChange.UNCHANGED),
        (_ratio(1.0, high=1.25), NumberChange.UNDECIDED),
    ],
)
def test_a_ratio_is_judged_at_its_edges(ratio: RatioEstimate, change: NumberChange) -> None:
    assert TOLERANCE == 0.25
    assert judge(ratio) is change


# -- comparisons -----------------------------------------------------------------------------------


def _finding(change: NumberChange = NumberChange.REGRESSED, **more: Any) -> NumberFinding:
    return NumberFinding(
        **{
            "series": "one",
            "title": "test_kill",
            "metric": "recovery",
            "unit": "s",
            "change": change,
            **more,
        }
    )


def _accepted(**more: Any) -> AcceptedRecord:
    return AcceptedRecord(
        **{
            "series": "one",
            "metric": "",
            "reason": "known",
            "until": TODAY,
            "by": "ann@host",
            **more,
        }
    )


@pytest.mark.parametrize(
    ("accepted", "note"),
    [
        ([], ""),
        ([_accepted()], "accepted until 2026-11-28: known"),
        ([_accepted(metric="recovery")], "accepted until 2026-11-28: known"),
        ([_accepted(metric="step")], ""),
        ([_accepted(series="two")], ""),
        ([_accepted(until=TODAY - timedelta(days=1))], ""),
        (
            [_accepted(), _accepted(until=date(2027, 1, 1), reason="later")],
            "accepted until 2027-01-01: later",
        ),
    ],
)
def test_what_is_worse_may_be_accepted_until_a_day(
    accepted: list[AcceptedRecord], note: str
) -> None:
    better = _finding(NumberChange.BETTER)
    comparison = RunComparison(findings=[_finding(), better], absent=["test_gone"])
    noted = with_accepted(comparison, accepted, TODAY)
    assert [finding.accepted for finding in noted.findings] == [note, ""]
    assert noted.absent == ["test_gone"]
    assert noted.is_regressed is (note == "")
    assert exit_code(noted, is_strict=False) == (0 if note else 1)
    assert with_accepted_findings([better], accepted, TODAY) == [better]


@pytest.mark.parametrize(
    ("findings", "absent", "code", "strict"),
    [
        ([_finding(NumberChange.UNCHANGED)], [], 0, 0),
        ([_finding(NumberChange.BETTER)], [], 0, 0),
        ([_finding(NumberChange.UNCHANGED)], ["gone"], 0, 10),
        ([_finding(NumberChange.UNDECIDED)], [], 0, 10),
        ([_finding(NumberChange.UNDECIDED), _finding(NumberChange.UNCHANGED)], [], 0, 10),
        ([_finding(NumberChange.UNDECIDED, metric="all")], [], 10, 10),
        ([_finding(NumberChange.UNCHANGED, metric="all")], [], 0, 0),
        ([_finding(NumberChange.INCOMPARABLE), _finding(NumberChange.NO_REFERENCE)], [], 10, 10),
        ([_finding(NumberChange.INCOMPARABLE), _finding(NumberChange.UNCHANGED)], [], 0, 10),
        ([_finding(), _finding(NumberChange.UNCHANGED)], [], 1, 1),
        ([], [], 10, 10),
    ],
)
def test_a_comparison_ends_with_a_status(
    findings: list[NumberFinding], absent: list[str], code: int, strict: int
) -> None:
    comparison = RunComparison(findings=findings, absent=absent)
    assert exit_code(comparison, is_strict=False) == code
    assert exit_code(comparison, is_strict=True) == strict


def test_series_of_one_side_alone_are_named() -> None:
    early = [run(series="one", title="a"), run(series="two", title="b")]
    late = [run(series="two", title="b"), run(series="three", title="c")]
    comparison = compare(early, late)
    assert comparison.absent == ["a"]
    (new,) = [finding for finding in comparison.findings if finding.title == "c"]
    assert (new.change, new.reason) == (NumberChange.NO_REFERENCE, "runs now: 1; before: none")
    assert {finding.title for finding in comparison.findings} == {"b", "c"}
    assert comparison.uncounted == {}


def test_one_number_is_compared_series_by_series() -> None:
    early = [run(0.05 + 0.001 * number) for number in range(9)]
    late = [run(0.15 + 0.001 * number) for number in range(9)]
    for name in ("recovery", "recovery / step"):
        (slower,) = compare_number(early, late, name)
        assert (slower.metric, slower.change) == (name, NumberChange.REGRESSED)
    (new,) = compare_number([], late, "recovery")
    assert new.change is NumberChange.NO_REFERENCE
    assert compare_number(early, late, "exposure") == []
    (lacking,) = compare_number(early, [run(None)], "recovery")
    assert lacking.reason == "not measured any more: 9 runs before have it"


def test_a_count_that_is_new_has_no_reference() -> None:
    def without(name: str, record: RunRecord) -> RunRecord:
        kept = {key: metric for key, metric in record.metrics.items() if key != name}
        return msgspec.structs.replace(record, metrics=kept)

    early = [without("false_alarms", run())]
    (new,) = [
        finding for finding in compare(early, [run()]).findings if finding.metric == "false_alarms"
    ]
    assert (new.change, new.after) == (NumberChange.NO_REFERENCE, 0.0)
    (gone,) = [
        finding for finding in compare([run()], early).findings if finding.metric == "false_alarms"
    ]
    assert (gone.change, gone.reason) == (
        NumberChange.UNDECIDED,
        "not measured any more: 1 runs before have it",
    )


@pytest.mark.parametrize(
    ("by", "is_said"), [(1.0, False), (1.04, False), (1.06, True), (0.94, True)]
)
def test_seconds_of_a_machine_that_was_not_as_fast_decide_nothing(by: float, is_said: bool) -> None:
    assert 0.04 < CONTROL < 0.06
    early, late = [run(step_s=1.0)] * 9, [run(step_s=by)] * 9
    (finding,) = compare_number(early, late, "recovery")
    assert (finding.change is NumberChange.INCOMPARABLE) is is_said
    assert ("slower" in finding.reason, "faster" in finding.reason) == (
        is_said and by > 1,
        is_said and by < 1,
    )


def test_values_are_those_of_runs_that_came_back() -> None:
    runs = [run(0.1, step_s=0.05), run(0.2, verdict=Verdict.FAILED), run(None), run(0.0)]
    assert samples_of(runs, "recovery") == [0.1]
    assert samples_of(runs[:1], "recovery / step") == [2.0]
    assert samples_of(runs[:1], "recovery/exposure") == []


@pytest.mark.parametrize(
    ("more", "says_something"),
    [({}, True), ({"claimed": False}, False), ({"verdict": Verdict.UNKNOWN}, False)],
)
def test_a_run_that_says_nothing_is_not_compared(
    more: dict[str, Any], says_something: bool
) -> None:
    assert is_conclusive(run(**more)) is says_something
    assert bool(compare([], [run(**more)]).uncounted) is not says_something


def test_one_bad_number_of_many_is_taken_for_chance() -> None:
    """The least probable number must be less probable than the share of false findings, divided by
    their count.
    """
    bad = _finding(ratio=_ratio(1.5, greater=0.004))
    rest = [_finding(NumberChange.UNCHANGED, ratio=_ratio(1.0)) for _ in range(11)]
    assert withdraw_chance_regressions([bad, *rest])[0].change is NumberChange.REGRESSED
    (doubted, *_) = withdraw_chance_regressions([bad, *rest, *rest])
    assert doubted.change is NumberChange.UNDECIDED
    assert doubted.reason == "of 23 numbers some look regressed by chance; more runs can decide"
    elsewhere = [_finding(NumberChange.INCOMPARABLE, ratio=_ratio(1.0)) for _ in range(30)]
    assert withdraw_chance_regressions([bad, *rest, *elsewhere])[0].change is NumberChange.REGRESSED


def test_texts_of_findings() -> None:
    assert ratio_text(_finding()) == ""
    assert ratio_text(_finding(ratio=_ratio(1.5, high=2.0))) == "1.50 (0.10 .. 2.00)"
    assert ratio_text(_finding(ratio=_ratio(1.5, high=inf))) == "1.50"
    assert value_text(_finding(), None) == "–"
    assert value_text(_finding(), 1.5) == "1.5 s"
    assert value_text(_finding(unit="ratio"), 1.5) == "1.5 x"
    assert value_text(_finding(unit="count"), 0.5) == "50%"
    assert [sparkline(values) for values in ([], [1.0, 1.0], [0.0, 7.0, 3.0])] == ["", "▁▁", "▁█▄"]
    rows = [
        markdown(RunComparison(findings=[_finding()] * count)).splitlines() for count in (200, 201)
    ]
    assert [sum(line.startswith("| ❌") for line in lines) for lines in rows] == [200, 200]
    assert [[line for line in lines if line.startswith("and ")] for lines in rows] == [
        [],
        ["and 1 more"],
    ]
    worst, open_ = _finding(), _finding(NumberChange.UNDECIDED)
    comparison = RunComparison(findings=[open_, _finding(NumberChange.UNCHANGED), worst])
    assert top_changes(comparison) == [worst, open_]


# -- sessions --------------------------------------------------------------------------------------


def _lines(*records: RunRecord) -> list[str]:
    return encode(records).decode().splitlines()


def test_a_session_is_kept_once_in_its_history_and_its_file(tmp_path: Path) -> None:
    store, save = str(tmp_path / "history"), tmp_path / "saved.jsonl"
    records = SessionRecords(store, save, "")
    first, second = run(started_unix_ns=1), run(started_unix_ns=2)
    records.take(_lines(first))
    assert [kept.run_id for kept in read(store).runs] == [first.run_id], (
        "a record is written when its test is over"
    )
    records.take([*_lines(first, second), "{damaged"])
    assert records.finish(is_well=True) is None
    assert records.runs == 2
    assert (len(records.troubles), records.has_failed, records.is_first) == (1, False, False)
    assert records.troubles[0].startswith("a record was lost: ")
    for place in (store, str(save)):
        kept = read(place).runs
        assert [made.run_id for made in kept] == [first.run_id, second.run_id]
        assert len({made.session for made in kept}) == 1
        assert kept[0].session != first.session
    assert [made.run_id for made in records.everything().runs] == [first.run_id, second.run_id]


def test_the_plan_of_a_series_is_kept_once(tmp_path: Path) -> None:
    """A run of the history can be replayed with this plan."""
    store, save = str(tmp_path / "history"), tmp_path / "saved.jsonl"
    records = SessionRecords(store, save, "")
    for name in ("a", "b"):
        made = outcome("x")
        made.run_id = name
        records.take(lines_of([_planned(made, tmp_path)], Sources(root=tmp_path), "b.py::test_y"))
    records.finish(is_well=True)
    (history,) = (tmp_path / "history").rglob("*.jsonl")
    for path in (history, save):
        kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
        assert sorted(kinds) == ["run", "run", "series"]
    assert read(store).plans == read(str(save)).plans == records.everything().plans != {}


@pytest.mark.parametrize(
    ("is_well", "count", "trouble"),
    [
        (True, 1, ""),
        (False, 1, "was not made: the session did not end well"),
        (True, 0, "was not made: no run was recorded"),
    ],
)
def test_a_baseline_is_made_of_a_session_that_is_well(
    tmp_path: Path, is_well: bool, count: int, trouble: str
) -> None:
    baseline = tmp_path / "base.jsonl"
    records = SessionRecords("", None, str(baseline))
    assert records.is_first
    records.take(_lines(*[run() for _ in range(count)]))
    assert records.finish(is_well=is_well) is None
    assert baseline.exists() is records.is_compared_next is (trouble == "")
    assert records.has_failed is (trouble != "")
    assert [line.removeprefix(f"{baseline} ") for line in records.troubles] == (
        [trouble] if trouble else []
    )


def test_a_later_session_is_compared_and_changes_no_baseline(tmp_path: Path) -> None:
    baseline = tmp_path / "base.jsonl"
    accepted = _accepted(until=datetime.now(UTC).date() + timedelta(days=1))
    baseline.write_bytes(encode([run(lost_steps=0, false_alarms=0), accepted]))
    before = baseline.read_bytes()
    records = SessionRecords("", None, str(baseline))
    assert not records.is_first
    records.take(_lines(run(false_alarms=1)))
    comparison = records.finish(is_well=True)
    assert comparison is not None
    (worse,) = [
        finding for finding in comparison.findings if finding.change is NumberChange.REGRESSED
    ]
    assert (worse.metric, worse.accepted[:14]) == ("false_alarms", "accepted until")
    assert not records.is_compared_next
    assert baseline.read_bytes() == before


def test_a_history_is_its_own_baseline_if_a_run_was_added(tmp_path: Path) -> None:
    store = str(tmp_path / "history")
    empty = SessionRecords(store, None, store)
    assert empty.is_first
    assert empty.finish(is_well=True) is None
    assert not empty.is_compared_next
    first = SessionRecords(store, None, store)
    first.take(_lines(run()))
    first.finish(is_well=False)
    assert first.is_compared_next
    later = SessionRecords(store, None, store)
    assert not later.is_first
    later.take(_lines(run()))
    assert later.finish(is_well=True) is not None


def test_what_could_not_be_added_is_tried_again(tmp_path: Path) -> None:
    """A place that cannot be written is reported once, and gets all records when it can be written
    again.
    """
    store = tmp_path / "history"
    SessionRecords(str(store), None, "").take(_lines(run()))
    records = SessionRecords(str(store), None, "")
    (folder,) = [path for path in store.iterdir() if path.is_dir()]
    moved = folder.rename(tmp_path / "moved")
    folder.write_text("a file in its place")
    added = [run(), run()]
    for record in added:
        records.take(_lines(record))
    assert len(records.troubles) == 1
    folder.unlink()
    moved.rename(folder)
    records.finish(is_well=True)
    assert not records.has_failed
    assert {kept.run_id for kept in read(str(store)).runs} >= {record.run_id for record in added}


def test_a_report_is_read_as_a_session(tmp_path: Path) -> None:
    """The result of ``lines_of`` is what ``take`` expects."""
    made = _planned(failed(), tmp_path)
    write_outcome(made, tmp_path)
    records = SessionRecords("", None, "")
    records.take(lines_of([made], Sources(root=tmp_path), "test_x"))
    (kept,) = records.everything().runs
    assert (kept.title, kept.verdict) == ("test_x", Verdict.FAILED)
    assert {*records.everything().plans} == {kept.series}


# -- stores ----------------------------------------------------------------------------------------


def _night(**more: Any) -> NightRecord:
    made = {
        "night": "1",
        "name": "small",
        "commit": "aa",
        "started_unix_ns": 1,
        "seconds": 1.0,
        "exit_code": 0,
    }
    return NightRecord(**{**made, "units": [], **more})


def test_the_last_good_night_is_that_of_a_name() -> None:
    nights = [
        _night(),
        _night(night="2", name="large", commit="bb"),
        _night(night="3", commit="cc", exit_code=1),
        _night(night="4", commit="dd", is_changed=True),
        _night(night="5", commit=""),
    ]
    contents = RunContents(nights=nights)
    assert [contents.last_good(name) for name in ("", "small", "large", "other")] == [
        "bb",
        "aa",
        "bb",
        "",
    ]


def test_records_are_added_line_by_line(tmp_path: Path) -> None:
    """A new record follows a complete line directly; an incomplete line is ended first."""
    history = RunHistory(str(tmp_path / "history"))
    for _ in range(2):
        history.add("01a2236a-e633-7a44-b681-1e46766376ca", [run()])
    history.close()
    (file,) = (tmp_path / "history").rglob("*.jsonl")
    assert file.read_bytes().count(b"\n") == 2
    assert b"\n\n" not in file.read_bytes()
    file.write_bytes(file.read_bytes() + b'{"kind":')
    history.add("01a2236a-e633-7a44-b681-1e46766376ca", [run()])
    contents = history.read()
    assert (len(contents.runs), len(contents.set_aside)) == (3, 1)


def test_lines_without_a_record_are_no_trouble() -> None:
    contents = RunContents()
    contents.take(b"\n" + encode([run()]) + b" \n", "a")
    assert (len(contents.runs), contents.set_aside) == (1, [])


def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    """The file is skipped, and the other files are used."""
    history = RunHistory(str(tmp_path / "history"))
    for session in ("01a2236a-e633-7a44-b681-1e46766376ca", "01a2236b-e633-7a44-b681-1e46766376ca"):
        history.add(session, [run()])
    first, _ = sorted((tmp_path / "history").rglob("*.jsonl"))
    first.unlink()
    first.symlink_to("/proc/self/mem")  # its first byte cannot be read, not even by root
    contents = history.read()
    assert len(contents.runs) == 1
    (line,) = contents.set_aside
    assert first.name in line
    assert "it cannot be read" in line
