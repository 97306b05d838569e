"""Two sets of runs beside each other: what is worse, what is not, and of what nothing can be said."""

from __future__ import annotations

import random
from math import exp
from typing import Any

import pytest
from support.runs import run

from chaoskit.history.compare import Change, Comparison, compare
from chaoskit.history.faces import comparison_sentence, markdown, render_comparison
from chaoskit.history.record import RunRecord
from chaoskit.report.terminal import Terminal
from chaoskit.vocabulary import Verdict


def sample(size: int, by: float = 1.0, seed: int = 1, **more: Any) -> list[RunRecord]:
    chance = random.Random(seed)
    return [run(0.05 * by * exp(chance.gauss(0, 0.05)), **more) for _ in range(size)]


def changes(comparison: Comparison) -> dict[str, Change]:
    return {one.metric: one.change for one in comparison.findings}


def test_equal_runs_are_unchanged() -> None:
    assert set(changes(compare(sample(10), sample(10, seed=2))).values()) == {Change.UNCHANGED}


def test_a_longer_recovery_is_worse_and_a_shorter_one_better() -> None:
    """In seconds, and beside a step of its own run."""
    worse = changes(compare(sample(10), sample(10, by=1.3, seed=2)))
    assert worse["recovery"] is worse["recovery / step"] is Change.REGRESSED
    better = changes(compare(sample(10), sample(10, by=0.7, seed=2)))
    assert better["recovery"] is better["recovery / step"] is Change.BETTER
    assert changes(compare(sample(10), sample(10, by=1.3, seed=2), 0.5))["recovery"] is Change.UNCHANGED


def test_a_few_runs_cannot_decide_and_say_how_many_would() -> None:
    found = compare(sample(4), sample(4, by=1.5, seed=2))
    assert changes(found)["recovery"] is Change.UNDECIDED
    assert "5 each at least" in next(one.reason for one in found.findings if one.metric == "recovery")


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"machine": "another one, 64 cores, local"}, "another machine"), ({"step_s": 0.012}, "1.20 x as long")],
)
def test_seconds_of_another_machine_decide_nothing(more: dict[str, Any], reason: str) -> None:
    """Nor those of the same one on a slow day. What is divided by a step of the same run does."""
    slower = 1.2 if "step_s" in more else 1.5
    found = compare(sample(10), sample(10, by=slower, seed=2, **more))
    assert changes(found)["recovery"] is Change.INCOMPARABLE
    assert reason in next(one.reason for one in found.findings if one.metric == "recovery")
    expected = Change.UNCHANGED if "step_s" in more else Change.REGRESSED
    assert changes(found)["recovery / step"] is expected


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        ("recovered", {"verdict": Verdict.FAILED}),
        ("lost_steps", {"lost_steps": 1}),
        ("false_alarms", {"false_alarms": 2}),
        ("losses_equal", {"losses_equal": 0}),
    ],
)
def test_one_miss_is_a_finding_where_there_was_none(metric: str, more: dict[str, Any]) -> None:
    found = compare([run()], [run(), run(**more)])
    assert changes(found)[metric] is Change.REGRESSED
    assert found.is_regressed
    assert "1 of 2 runs missed it, 0 of 1 before" in markdown(found)
    assert changes(compare([run(**more)], [run(**more)]))[metric] is Change.UNDECIDED
    assert changes(compare([run(**more)], [run()]))[metric] is Change.BETTER


def test_a_new_test_has_no_reference_and_one_without_a_run_is_named() -> None:
    found = compare([run(title="test_old")], [run(series="two", title="test_new")])
    assert changes(found) == {"all": Change.NO_REFERENCE}
    assert found.absent == ["test_old"]
    assert found.is_open
    assert "1 no reference; 1 series of before had no run" in comparison_sentence(found)


def test_another_definition_is_another_series() -> None:
    assert changes(compare([run()], [run(definition=2)])) == {"all": Change.NO_REFERENCE}


@pytest.mark.parametrize("more", [{"verdict": Verdict.UNKNOWN}, {"verdict": Verdict.ERROR}])
def test_runs_that_say_nothing_are_counted_apart(more: dict[str, Any]) -> None:
    """All of them unknown: nothing was compared, which is no good news."""
    found = compare([run()], [run(**more)])
    assert found.findings == []
    assert found.uncounted == {more["verdict"].value: 1}
    assert found.is_open
    assert not found.is_regressed


def test_what_its_test_judges_by_itself_is_not_compared() -> None:
    assert compare([run()], [run(claimed=False, verdict=Verdict.FAILED)]).findings == []


def test_chance_alone_is_called_worse_in_one_of_a_hundred() -> None:
    """2,000 pairs of ten runs of the same: the limit is 1 %, beside a tolerance that takes most of that."""
    wrong = sum(compare(sample(10, seed=2 * n), sample(10, seed=2 * n + 1)).is_regressed for n in range(2000))
    assert wrong <= 20


def test_faces_say_the_same() -> None:
    found = compare(sample(10, title="test|kill\x1b"), sample(10, by=1.4, seed=2, title="test|kill\x1b"))
    terminal = Terminal(record=True, width=100)
    terminal.print(render_comparison(found))
    shown = terminal.export_text()
    for told in (shown, markdown(found)):
        assert "regressed" in told
        assert "\x1b" not in told
    assert "test\\|kill" in markdown(found)
