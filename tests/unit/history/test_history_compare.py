"""Comparison of two sets of runs: numbers that are worse, numbers that are not, and numbers that
cannot be decided.
"""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
from support.runs import run

from chaoskit.history.compare import RunComparison, compare
from chaoskit.history.finding import NumberChange
from chaoskit.history.record import Metric, RunRecord
from chaoskit.history.rendering import comparison_sentence, markdown, render_comparison
from chaoskit.report.terminal import Terminal
from chaoskit.vocabulary import Verdict


def sample(size: int, by: float = 1.0, seed: int = 1, **more: Any) -> list[RunRecord]:
    chance = random.Random(seed)
    return [run(0.05 * by * exp(chance.gauss(0, 0.05)), **more) for _ in range(size)]


def changes(comparison: RunComparison) -> dict[str, NumberChange]:
    return {finding.metric: finding.change for finding in comparison.findings}


def test_equal_runs_are_unchanged() -> None:
    assert set(changes(compare(sample(10), sample(10, seed=2))).values()) == {
        NumberChange.UNCHANGED
    }


def test_a_longer_recovery_is_worse_and_a_shorter_one_better() -> None:
    """The verdict holds in seconds, and relative to a step of the same run."""
    worse = changes(compare(sample(10), sample(10, by=1.3, seed=2)))
    assert worse["recovery"] is worse["recovery / step"] is NumberChange.REGRESSED
    better = changes(compare(sample(10), sample(10, by=0.7, seed=2)))
    assert better["recovery"] is better["recovery / step"] is NumberChange.BETTER
    assert (
        changes(compare(sample(10), sample(10, by=1.3, seed=2), 0.5))["recovery"]
        is NumberChange.UNCHANGED
    )


def test_a_few_runs_cannot_decide_and_say_how_many_would() -> None:
    comparison = compare(sample(4), sample(4, by=1.5, seed=2))
    assert changes(comparison)["recovery"] is NumberChange.UNDECIDED
    assert "at least 5 of each" in next(
        finding.reason for finding in comparison.findings if finding.metric == "recovery"
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"machine": "another one, 64 cores, local"}, "another machine"),
        ({"step_s": 0.012}, "1.20 x as long"),
    ],
)
def test_seconds_of_another_machine_decide_nothing(more: dict[str, Any], reason: str) -> None:
    """Seconds of the same machine on a slow day do not decide either.

    A quotient by a step of the same run does.
    """
    slower = 1.2 if "step_s" in more else 1.5
    comparison = compare(sample(10), sample(10, by=slower, seed=2, **more))
    assert changes(comparison)["recovery"] is NumberChange.INCOMPARABLE
    assert reason in next(
        finding.reason for finding in comparison.findings if finding.metric == "recovery"
    )
    expected = NumberChange.UNCHANGED if "step_s" in more else NumberChange.REGRESSED
    assert changes(comparison)["recovery / step"] is expected


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        ("recovered", {"verdict": Verdict.FAILED}),
        ("false_alarms", {"false_alarms": 2}),
        ("losses_equal", {"losses_equal": 0}),
    ],
)
def test_one_miss_is_a_finding_where_there_was_none(metric: str, more: dict[str, Any]) -> None:
    comparison = compare([run()], [run(), run(**more)])
    assert changes(comparison)[metric] is NumberChange.REGRESSED
    assert comparison.is_regressed
    assert "1 of 2 runs missed it, 0 of 1 before" in markdown(comparison)
    assert changes(compare([run(**more)], [run(**more)]))[metric] is NumberChange.UNDECIDED
    assert changes(compare([run(**more)] * 10, [run()] * 10))[metric] is NumberChange.BETTER


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ((1, 50), (50, 50), NumberChange.REGRESSED),
        ((1, 200), (20, 20), NumberChange.REGRESSED),
        ((2, 20), (3, 20), NumberChange.UNDECIDED),
        ((9, 10), (0, 1), NumberChange.UNDECIDED),
        ((9, 10), (0, 10), NumberChange.BETTER),
    ],
)
def test_where_some_missed_before_the_shares_decide(
    before: tuple[int, int], after: tuple[int, int], change: NumberChange
) -> None:
    """A miss in the baseline does not switch the gate off."""

    def runs(misses: int, of: int) -> list[RunRecord]:
        return [run(false_alarms=int(number < misses)) for number in range(of)]

    assert changes(compare(runs(*before), runs(*after)))["false_alarms"] is change


def test_lost_steps_are_compared_by_shares_alone() -> None:
    """The loss of a step may depend on the moment of a fault."""
    assert (
        changes(compare([run()] * 5, [run(lost_steps=1)]))["lost_steps"] is NumberChange.UNDECIDED
    )
    assert (
        changes(compare([run()] * 6, [run(lost_steps=1)] * 6))["lost_steps"]
        is NumberChange.REGRESSED
    )


def test_what_is_not_measured_any_more_is_no_good_news() -> None:
    comparison = compare([run()] * 6, [run(recovery_s=None)] * 6)
    assert (
        changes(comparison)["recovery"]
        is changes(comparison)["recovery / step"]
        is NumberChange.UNDECIDED
    )
    assert "not measured any more" in markdown(comparison)


def test_a_quotient_whose_divisor_got_smaller_is_not_worse() -> None:
    """Steps got faster, or the machine is faster, and a recovery waits for a fixed limit."""
    comparison = compare(sample(10), sample(10, seed=2, step_s=0.005))
    assert changes(comparison)["recovery / step"] is NumberChange.INCOMPARABLE
    assert "step got shorter" in markdown(comparison)


def test_seconds_are_compared_on_each_machine_by_itself() -> None:
    """Seconds of different machines are not mixed; a session with another mix would otherwise look
    worse.
    """
    slow = {"machine": "a slow one, 1 core, local"}
    before = [*sample(9), *sample(1, by=3.0, **slow)]
    after = [*sample(6, seed=2), *sample(14, by=3.0, seed=3, **slow)]
    assert changes(compare(before, after))["recovery"] is not NumberChange.REGRESSED
    many = compare([*sample(20), *sample(1, **slow)], sample(10, by=1.5, seed=2))
    assert changes(many)["recovery"] is NumberChange.REGRESSED


def test_how_long_a_run_took_that_did_not_recover_says_nothing_of_the_others() -> None:
    failed = [run(0.5, verdict=Verdict.FAILED) for _ in range(10)]
    comparison = compare([*sample(10), *failed], sample(10, by=1.5, seed=2))
    assert changes(comparison)["recovery"] is NumberChange.REGRESSED


def test_among_many_series_some_look_worse_by_chance() -> None:
    """A single one of forty series that just passes the limit for one series is no regression."""
    before = sample(5)
    assert compare(before, [run(0.07) for _ in range(5)]).is_regressed
    others = [f"other{number}" for number in range(40)]
    same = [record for name in others for record in sample(5, series=name)]
    late = [record for name in others for record in sample(5, seed=7, series=name)]
    assert not compare([*before, *same], [*[run(0.07) for _ in range(5)], *late]).is_regressed


def test_a_new_test_has_no_reference_and_one_without_a_run_is_named() -> None:
    comparison = compare([run(title="test_old")], [run(series="two", title="test_new")])
    assert changes(comparison) == {"all": NumberChange.NO_REFERENCE}
    assert comparison.absent == ["test_old"]
    assert comparison.is_open
    assert "1 no reference; 1 earlier series had no run" in comparison_sentence(comparison)


def test_another_definition_is_another_series() -> None:
    assert changes(compare([run()], [run(definition=2)])) == {"all": NumberChange.NO_REFERENCE}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"verdict": Verdict.UNKNOWN}, "unknown"),
        ({"verdict": Verdict.ERROR}, "error"),
        ({"claimed": False, "verdict": Verdict.FAILED}, "unclaimed"),
    ],
)
def test_runs_that_say_nothing_are_counted_apart(more: dict[str, Any], why: str) -> None:
    """Unknown runs, and runs judged by their tests, are counted apart: nothing was compared, which
    is no good news.
    """
    comparison = compare([run()], [run(**more)])
    assert comparison.findings == []
    assert comparison.uncounted == {why: 1}
    assert comparison.is_open
    assert not comparison.is_regressed


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_chance_alone_is_called_worse_in_one_of_a_hundred(noise: float) -> None:
    """Recoveries, steps and bounds of 1,000 pairs of ten equal runs vary independently."""
    chance = random.Random(5)

    def runs() -> list[RunRecord]:
        records = []
        for _ in range(10):
            recovery_s, step_s, bound_s = (
                by * exp(chance.gauss(0, noise)) for by in (0.05, 0.01, 0.005)
            )
            records.append(run(recovery_s, step_s))
            records[-1].metrics["bound"] = Metric(bound_s, "s", "")
        return records

    wrong = sum(compare(runs(), runs()).is_regressed for _ in range(1000))
    assert wrong <= 20  # 10 are expected at most; 20 come about once in 300 attempts


def test_faces_say_the_same() -> None:
    comparison = compare(
        sample(10, title="test|kill\x1b"), sample(10, by=1.4, seed=2, title="test|kill\x1b")
    )
    terminal = Terminal(record=True, width=100)
    terminal.print(render_comparison(comparison))
    shown = terminal.export_text()
    for text in (shown, markdown(comparison)):
        assert "regressed" in text
        assert "\x1b" not in text
    assert "test\\|kill" in markdown(comparison)
    assert "\\<b\\>\\@all" in markdown(compare([run()], [run(series="two", title="<b>@all")]))


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (0.0088, "the machine was faster: a step took 0.88 x as long"),
        (0.012, "the machine was slower: a step took 1.20 x as long"),
    ],
)
def test_a_machine_that_was_faster_is_not_called_slower(step_s: float, told: str) -> None:
    comparison = compare(sample(10), sample(10, seed=2, step_s=step_s))
    assert (
        next(finding.reason for finding in comparison.findings if finding.metric == "recovery")
        == told
    )


def test_a_bound_that_is_the_step_is_no_number_of_its_own() -> None:
    """The bound of a command's recovery is one usual step, so both quotients are equal."""

    def of_command(by: float, seed: int) -> list[RunRecord]:
        runs = sample(10, by=by, seed=seed, stack="command")
        for record in runs:
            record.metrics["bound"] = record.metrics["step"]
        return runs

    worse = [name for name, change in changes(compare(of_command(1.0, 1), of_command(1.5, 2))).items()
             if change is NumberChange.REGRESSED]  # fmt: skip
    assert worse == ["recovery / step", "recovery"]
    of_jobs = changes(compare(sample(10), sample(10, by=1.5, seed=2)))
    assert of_jobs["recovery / bound"] is NumberChange.REGRESSED


def with_strength(runs: list[RunRecord], times: float) -> list[RunRecord]:
    """Return the runs; their world was whole again after ``times`` times their recovery."""
    for record in runs:
        record.metrics["full_strength"] = Metric(
            record.metrics["recovery"].value * times, "s", "lower"
        )
    return runs


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (1.0, 3.0, NumberChange.REGRESSED),  # a spare that took part at once, and joins later now
        (3.0, 6.0, NumberChange.REGRESSED),
        (3.0, 1.0, NumberChange.BETTER),
        (3.0, 3.0, NumberChange.UNCHANGED),
        (1.0, 1.0, None),  # full strength is the recovery itself, which is compared already
    ],
)
def test_full_strength_behind_the_recovery_is_decided(
    before: float, after: float, change: NumberChange | None
) -> None:
    found_changes = changes(
        compare(with_strength(sample(10), before), with_strength(sample(10, seed=2), after))
    )
    assert found_changes["recovery / step"] is NumberChange.UNCHANGED
    assert found_changes.get("full_strength / step") is change


def test_a_world_that_is_never_whole_again_is_said() -> None:
    comparison = compare(with_strength(sample(10), 1.0), sample(10, seed=2))
    (strength,) = [
        finding for finding in comparison.findings if finding.metric == "full_strength / step"
    ]
    assert "not measured any more" in strength.reason
