"""Two sets of runs beside each other: what is worse, what is not, and of what nothing can be said."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
from support.runs import run

from chaoskit.history.compare import RunComparison, compare
from chaoskit.history.faces import comparison_sentence, markdown, render_comparison
from chaoskit.history.finding import NumberChange
from chaoskit.history.record import Metric, RunRecord
from chaoskit.report.terminal import Terminal
from chaoskit.vocabulary import Verdict


def sample(size: int, by: float = 1.0, seed: int = 1, **more: Any) -> list[RunRecord]:
    chance = random.Random(seed)
    return [run(0.05 * by * exp(chance.gauss(0, 0.05)), **more) for _ in range(size)]


def changes(comparison: RunComparison) -> dict[str, NumberChange]:
    return {one.metric: one.change for one in comparison.findings}


def test_equal_runs_are_unchanged() -> None:
    assert set(changes(compare(sample(10), sample(10, seed=2))).values()) == {
        NumberChange.UNCHANGED
    }


def test_a_longer_recovery_is_worse_and_a_shorter_one_better() -> None:
    """In seconds, and beside a step of its own run."""
    worse = changes(compare(sample(10), sample(10, by=1.3, seed=2)))
    assert worse["recovery"] is worse["recovery / step"] is NumberChange.REGRESSED
    better = changes(compare(sample(10), sample(10, by=0.7, seed=2)))
    assert better["recovery"] is better["recovery / step"] is NumberChange.BETTER
    assert (
        changes(compare(sample(10), sample(10, by=1.3, seed=2), 0.5))["recovery"]
        is NumberChange.UNCHANGED
    )


def test_a_few_runs_cannot_decide_and_say_how_many_would() -> None:
    found = compare(sample(4), sample(4, by=1.5, seed=2))
    assert changes(found)["recovery"] is NumberChange.UNDECIDED
    assert "5 each at least" in next(
        one.reason for one in found.findings if one.metric == "recovery"
    )


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"machine": "another one, 64 cores, local"}, "another machine"),
        ({"step_s": 0.012}, "1.20 x as long"),
    ],
)
def test_seconds_of_another_machine_decide_nothing(more: dict[str, Any], reason: str) -> None:
    """Nor those of the same one on a slow day. What is divided by a step of the same run does."""
    slower = 1.2 if "step_s" in more else 1.5
    found = compare(sample(10), sample(10, by=slower, seed=2, **more))
    assert changes(found)["recovery"] is NumberChange.INCOMPARABLE
    assert reason in next(one.reason for one in found.findings if one.metric == "recovery")
    expected = NumberChange.UNCHANGED if "step_s" in more else NumberChange.REGRESSED
    assert changes(found)["recovery / step"] is expected


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        ("recovered", {"verdict": Verdict.FAILED}),
        ("false_alarms", {"false_alarms": 2}),
        ("losses_equal", {"losses_equal": 0}),
    ],
)
def test_one_miss_is_a_finding_where_there_was_none(metric: str, more: dict[str, Any]) -> None:
    found = compare([run()], [run(), run(**more)])
    assert changes(found)[metric] is NumberChange.REGRESSED
    assert found.is_regressed
    assert "1 of 2 runs missed it, 0 of 1 before" in markdown(found)
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
    """Whether one is lost may depend on the moment of a fault."""
    assert (
        changes(compare([run()] * 5, [run(lost_steps=1)]))["lost_steps"] is NumberChange.UNDECIDED
    )
    assert (
        changes(compare([run()] * 6, [run(lost_steps=1)] * 6))["lost_steps"]
        is NumberChange.REGRESSED
    )


def test_what_is_not_measured_any_more_is_no_good_news() -> None:
    found = compare([run()] * 6, [run(recovery_s=None)] * 6)
    assert changes(found)["recovery"] is changes(found)["recovery / step"] is NumberChange.UNDECIDED
    assert "not measured any more" in markdown(found)


def test_a_quotient_whose_divisor_got_smaller_is_not_worse() -> None:
    """Steps that got faster, or a machine that is, and a recovery that waits for a fixed limit."""
    found = compare(sample(10), sample(10, seed=2, step_s=0.005))
    assert changes(found)["recovery / step"] is NumberChange.INCOMPARABLE
    assert "step got shorter" in markdown(found)


def test_seconds_are_compared_on_each_machine_by_itself() -> None:
    """Else a session with another mix of machines would look worse."""
    slow = {"machine": "a slow one, 1 core, local"}
    before = [*sample(9), *sample(1, by=3.0, **slow)]
    after = [*sample(6, seed=2), *sample(14, by=3.0, seed=3, **slow)]
    assert changes(compare(before, after))["recovery"] is not NumberChange.REGRESSED
    many = compare([*sample(20), *sample(1, **slow)], sample(10, by=1.5, seed=2))
    assert changes(many)["recovery"] is NumberChange.REGRESSED


def test_how_long_a_run_took_that_did_not_recover_says_nothing_of_the_others() -> None:
    failed = [run(0.5, verdict=Verdict.FAILED) for _ in range(10)]
    found = compare([*sample(10), *failed], sample(10, by=1.5, seed=2))
    assert changes(found)["recovery"] is NumberChange.REGRESSED


def test_among_many_series_some_look_worse_by_chance() -> None:
    """One of forty that just passes the limit for one alone is not called so."""
    before = sample(5)
    assert compare(before, [run(0.07) for _ in range(5)]).is_regressed
    others = [f"other{number}" for number in range(40)]
    same = [one for name in others for one in sample(5, series=name)]
    late = [one for name in others for one in sample(5, seed=7, series=name)]
    assert not compare([*before, *same], [*[run(0.07) for _ in range(5)], *late]).is_regressed


def test_a_new_test_has_no_reference_and_one_without_a_run_is_named() -> None:
    found = compare([run(title="test_old")], [run(series="two", title="test_new")])
    assert changes(found) == {"all": NumberChange.NO_REFERENCE}
    assert found.absent == ["test_old"]
    assert found.is_open
    assert "1 no reference; 1 series of before had no run" in comparison_sentence(found)


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
    """All of them unknown, or judged by their tests: nothing was compared, which is no good news."""
    found = compare([run()], [run(**more)])
    assert found.findings == []
    assert found.uncounted == {why: 1}
    assert found.is_open
    assert not found.is_regressed


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_chance_alone_is_called_worse_in_one_of_a_hundred(noise: float) -> None:
    """1,000 pairs of ten runs of the same, whose recoveries, steps and bounds vary by themselves."""
    chance = random.Random(5)

    def runs() -> list[RunRecord]:
        found = []
        for _ in range(10):
            recovery_s, step_s, bound_s = (
                by * exp(chance.gauss(0, noise)) for by in (0.05, 0.01, 0.005)
            )
            found.append(run(recovery_s, step_s))
            found[-1].metrics["bound"] = Metric(bound_s, "s", "")
        return found

    wrong = sum(compare(runs(), runs()).is_regressed for _ in range(1000))
    assert wrong <= 20  # 10 are expected at most; 20 come about once in 300 tries


def test_faces_say_the_same() -> None:
    found = compare(
        sample(10, title="test|kill\x1b"), sample(10, by=1.4, seed=2, title="test|kill\x1b")
    )
    terminal = Terminal(record=True, width=100)
    terminal.print(render_comparison(found))
    shown = terminal.export_text()
    for told in (shown, markdown(found)):
        assert "regressed" in told
        assert "\x1b" not in told
    assert "test\\|kill" in markdown(found)
    assert "\\<b\\>\\@all" in markdown(compare([run()], [run(series="two", title="<b>@all")]))


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (0.0088, "the machine was faster: a step took 0.88 x as long"),
        (0.012, "the machine was slower: a step took 1.20 x as long"),
    ],
)
def test_a_machine_that_was_faster_is_not_called_slower(step_s: float, told: str) -> None:
    found = compare(sample(10), sample(10, seed=2, step_s=step_s))
    assert next(one.reason for one in found.findings if one.metric == "recovery") == told


def test_a_bound_that_is_the_step_is_no_number_of_its_own() -> None:
    """The bound of a command's recovery is one usual step: both quotients are the same one."""

    def of_command(by: float, seed: int) -> list[RunRecord]:
        runs = sample(10, by=by, seed=seed, stack="command")
        for one in runs:
            one.metrics["bound"] = one.metrics["step"]
        return runs

    worse = [name for name, change in changes(compare(of_command(1.0, 1), of_command(1.5, 2))).items()
             if change is NumberChange.REGRESSED]  # fmt: skip
    assert worse == ["recovery / step", "recovery"]
    of_jobs = changes(compare(sample(10), sample(10, by=1.5, seed=2)))
    assert of_jobs["recovery / bound"] is NumberChange.REGRESSED


def with_strength(runs: list[RunRecord], times: float) -> list[RunRecord]:
    """The same runs, whose world was whole again after so many times of their recovery."""
    for one in runs:
        one.metrics["full_strength"] = Metric(one.metrics["recovery"].value * times, "s", "lower")
    return runs


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (1.0, 3.0, NumberChange.REGRESSED),  # a spare that took part at once, and joins later now
        (3.0, 6.0, NumberChange.REGRESSED),
        (3.0, 1.0, NumberChange.BETTER),
        (3.0, 3.0, NumberChange.UNCHANGED),
        (1.0, 1.0, None),  # it is the recovery itself, which is compared already
    ],
)
def test_full_strength_behind_the_recovery_is_decided(
    before: float, after: float, change: NumberChange | None
) -> None:
    found = changes(
        compare(with_strength(sample(10), before), with_strength(sample(10, seed=2), after))
    )
    assert found["recovery / step"] is NumberChange.UNCHANGED
    assert found.get("full_strength / step") is change


def test_a_world_that_is_never_whole_again_is_said() -> None:
    found = compare(with_strength(sample(10), 1.0), sample(10, seed=2))
    (strength,) = [one for one in found.findings if one.metric == "full_strength / step"]
    assert "not measured any more" in strength.reason
