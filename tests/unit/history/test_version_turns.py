"""Two versions that run in turns: the time of the decision, and the phase that grew.

Without any run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs import run

from chaoskit.history.compare import RunComparison, exit_code
from chaoskit.history.finding import WHOLE, NumberChange, NumberFinding
from chaoskit.history.record import Metric, RunRecord
from chaoskit.versions.looks import LOOKS, SPREAD_MOST, decide, spread
from chaoskit.versions.phases import grown_phase
from chaoskit.versions.schedule import (
    ArmReport,
    ArmTurn,
    Side,
    VersionSchedule,
    merge_sessions,
    needs_confirmation,
)
from chaoskit.vocabulary import Verdict

PHASES = ("detected", "quiesced", "regrouped", "restored", "first_good_step")
#: Shares of the phases of a recovery.
SHARES = (0.02, 0.08, 0.2, 0.25, 0.45)


def phased(chance: random.Random, noise: float = 0.08, **growth: float) -> RunRecord:
    """Return a run with a recovery of about 0.2 s in five phases, each longer by its share of the
    whole.
    """
    lengths = {
        name: 0.2 * (share * chance.lognormvariate(0, noise) + growth.get(name, 0.0))
        for name, share in zip(PHASES, SHARES, strict=True)
    }
    record = run(sum(lengths.values()), step_s=0.05 * chance.lognormvariate(0, noise))
    spans = {f"recovery.{name}": Metric(length, "s", "lower") for name, length in lengths.items()}
    return msgspec.structs.replace(record, metrics=record.metrics | spans)


def finding(findings: Sequence[NumberFinding], metric: str) -> NumberFinding:
    return next(candidate for candidate in findings if candidate.metric == metric)


def drive(
    schedule: VersionSchedule, make: Callable[[ArmTurn], ArmReport], turn_s: float = 1.0
) -> list[ArmTurn]:
    """Take turns until all is over."""
    taken: list[ArmTurn] = []
    while turn := schedule.next_turn(turn_s * len(taken)):
        schedule.take(turn, make(turn))
        taken.append(turn)
        assert len(taken) < 1000
    return taken


def test_what_is_slower_is_found_and_what_is_equal_is_not() -> None:
    chance = random.Random(7)
    counts_by_growth = {grown: dict.fromkeys(NumberChange, 0) for grown in (0.0, 0.25)}
    for grown, counts in counts_by_growth.items():
        for _ in range(60):
            schedule = VersionSchedule(["test_kill"], numbers=("recovery",))
            drive(
                schedule,
                lambda turn, grown=grown: ArmReport(
                    [
                        run(
                            0.05
                            * chance.lognormvariate(0, 0.08)
                            * (1 + grown * (turn.side is Side.AFTER))
                        )
                    ]
                ),
            )
            counts[finding(schedule.findings, "recovery").change] += 1
    assert counts_by_growth[0.0][NumberChange.REGRESSED] <= 1
    assert counts_by_growth[0.0][NumberChange.UNCHANGED] >= 50
    assert counts_by_growth[0.25][NumberChange.REGRESSED] >= 55


def test_a_day_that_gets_slower_is_no_regression() -> None:
    chance = random.Random(11)
    regressed = 0
    for _ in range(50):
        schedule, count = VersionSchedule(["test_kill"], numbers=("recovery",)), iter(range(1000))

        def make(turn: ArmTurn, count: Any = count) -> ArmReport:
            slower = 1 + 0.15 * min(1.0, next(count) / 20)
            return ArmReport([run(0.05 * chance.lognormvariate(0, 0.08) * slower)])

        drive(schedule, make)
        regressed += finding(schedule.findings, "recovery").change is NumberChange.REGRESSED
    assert regressed <= 1


@given(
    tests=st.lists(st.text("abc", min_size=1, max_size=3), unique=True, min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    budget_s=st.none() | st.floats(0, 300),
)
def test_turns_are_fair(tests: list[str], seed: int, budget_s: float | None) -> None:
    """Each version runs equally often, neither goes first twice, and no test is ahead of another by
    more than a look.
    """
    chance, schedule = random.Random(seed), VersionSchedule(tests, budget_s=budget_s)

    def make(turn: ArmTurn) -> ArmReport:
        runs = (
            [run(0.05 * chance.lognormvariate(0, 0.2), title=turn.test)]
            if chance.random() < 0.97
            else []
        )
        return ArmReport(runs, seconds=1.0)

    taken = drive(schedule, make)
    for test in tests:
        turns_of_test = [turn for turn in taken if turn.test == test]
        sides = [turn.side for turn in turns_of_test]
        assert sides.count(Side.BEFORE) == sides.count(Side.AFTER) <= LOOKS[-1].runs + 1
        firsts = sides[::2]
        assert all(early is not late for early, late in pairwise(firsts))
        assert [turn.number for turn in turns_of_test] == [
            number // 2 for number in range(len(turns_of_test))
        ]
    warmed = [turn.test for turn in taken[: 2 * len(tests)]]
    if not schedule.is_spent:
        assert len(set(warmed)) == len(warmed) / 2  # each warms up before any goes on
    assert {result.title for result in schedule.findings} <= {*tests, "test_kill"}
    assert len({tested.test for tested in schedule.tests if tested.findings}) == len(
        tests
    )  # no test is left out
    if budget_s is not None:
        assert len(taken) <= max(0, budget_s) + 2


def test_a_budget_that_is_spent_leaves_tests_undecided() -> None:
    schedule = VersionSchedule(["one", "two"], budget_s=20)
    drive(schedule, lambda turn: ArmReport([run(title=turn.test)], seconds=1.0))
    assert schedule.is_spent
    assert [result.change for result in schedule.findings] == [NumberChange.UNCHANGED] * 6 + [
        NumberChange.UNDECIDED
    ]
    assert schedule.findings[-1].reason == "the budget is spent after 1 runs a side"


@pytest.mark.parametrize(
    ("tests", "budget_s", "turns"),
    [(["one"], 8.0, 2), ([f"test {number}" for number in range(300)], 8.0, 2), (["one"], 0.0, 0)],
    ids=["one test", "three hundred tests", "nothing at all"],
)
def test_a_budget_that_cannot_do_ends_it_before_the_turns(
    tests: list[str], budget_s: float, turns: int
) -> None:
    """A budget that is too short for a comparison is reported with the needed budget, and is no
    success.
    """
    schedule = VersionSchedule(tests, budget_s=budget_s)
    taken = drive(schedule, lambda turn: ArmReport([run(title=turn.test)], seconds=1.0))
    assert len(taken) == turns
    assert schedule.is_too_short
    assert exit_code(RunComparison(findings=schedule.findings), is_strict=False) == 10
    if turns:
        needed_s = 2.0 + 7 * 2.0 + (len(tests) - 1) * 8 * 2.0
        assert schedule.needed_s == pytest.approx(needed_s)


def test_warming_up_leaves_time_for_one_test_at_least() -> None:
    """The first tests are compared if there are more tests than the budget can warm up."""
    schedule = VersionSchedule([f"test {number}" for number in range(100)], budget_s=40)
    drive(schedule, lambda turn: ArmReport([run(title=turn.test)], seconds=1.0))
    assert not schedule.is_too_short
    assert any(result.change is NumberChange.UNCHANGED for result in schedule.findings)
    assert exit_code(RunComparison(findings=schedule.findings), is_strict=False) == 0
    assert exit_code(RunComparison(findings=schedule.findings), is_strict=True) == 10


def test_a_budget_that_ends_before_any_look_has_compared_nothing() -> None:
    """A session that ends before any look has compared nothing: here runs became slower than the
    first ones.
    """
    schedule = VersionSchedule(["one"], budget_s=60)
    drive(schedule, lambda turn: ArmReport([run(title=turn.test)], seconds=1.0 + 6 * turn.number))
    assert schedule.is_too_short
    assert exit_code(RunComparison(findings=schedule.findings), is_strict=False) == 10


def test_a_test_that_makes_no_run_in_one_version_is_incomparable() -> None:
    schedule = VersionSchedule(["one"])
    taken = drive(
        schedule,
        lambda turn: ArmReport(
            [run()] if turn.side is Side.AFTER else [], trouble="failed: No module named 'new'"
        ),
    )
    assert len(taken) == 2
    (result,) = schedule.findings
    assert result.change is NumberChange.INCOMPARABLE
    assert result.reason == "before: the test made no conclusive run: failed: No module named 'new'"


def test_a_test_that_is_another_experiment_now_is_incomparable() -> None:
    schedule = VersionSchedule(["one"])
    drive(schedule, lambda turn: ArmReport([run(series=turn.side)]))
    assert [result.change for result in schedule.findings] == [NumberChange.INCOMPARABLE]
    assert "another experiment" in schedule.findings[0].reason


def test_a_test_that_never_recovers_now_is_not_run_to_its_end() -> None:
    def make(turn: ArmTurn) -> ArmReport:
        if turn.side is Side.BEFORE:
            return ArmReport([run()])
        return ArmReport(
            [run(None, verdict=Verdict.FAILED)], trouble="failed: it did not come back"
        )

    schedule = VersionSchedule(["one"])
    assert len(drive(schedule, make)) == 6
    assert finding(schedule.findings, "recovered").change is NumberChange.REGRESSED


def test_a_run_that_fails_before_the_next_one_of_its_test_is_no_other_experiment() -> None:
    """The second of two runs of a test is not made if the first fails."""

    def make(turn: ArmTurn) -> ArmReport:
        first, second = run(title="one"), run(title="one #2", series="two")
        if turn.side is Side.BEFORE:
            return ArmReport([first, second])
        failed = run(None, title="one", verdict=Verdict.FAILED)
        return ArmReport([failed], trouble="failed: chaoskit verdict: failed")

    schedule = VersionSchedule(["one"])
    drive(schedule, make)
    assert finding(schedule.findings, "recovered").change is NumberChange.REGRESSED


def test_a_test_that_makes_fewer_runs_and_passes_is_incomparable() -> None:
    schedule = VersionSchedule(["one"])
    drive(
        schedule,
        lambda turn: ArmReport(
            [
                run(),
                *([run(title="test_kill #2", series="two")] if turn.side is Side.BEFORE else []),
            ]
        ),
    )
    assert [result.reason for result in schedule.findings] == [
        "after: the test makes fewer runs, and passes"
    ]


def test_a_version_that_dies_in_the_middle_is_worse_and_what_was_decided_stays() -> None:
    schedule = VersionSchedule(["one", "two"], numbers=("recovery", "step"))
    steps = iter([0.01, 0.0145] * 500)
    while turn := schedule.next_turn():
        if turn.test == "one" and turn.number == 9:
            schedule.give_up(ArmTurn("one", Side.AFTER, 9), "after: pytest ended with -9")
            break
        slower = 2 if turn.side is Side.AFTER else 1
        schedule.take(
            turn, ArmReport([run(0.05 * slower, next(steps), title=turn.test, series=turn.test)])
        )
    changes = {(result.title, result.metric): result.change for result in schedule.findings}
    assert changes["one", "recovery"] is NumberChange.REGRESSED  # at the first look
    assert changes["one", "test"] is NumberChange.REGRESSED
    assert changes["two", "all"] is NumberChange.INCOMPARABLE


def test_a_miss_counts_in_a_run_that_warms_up_too() -> None:
    schedule = VersionSchedule(["one"])
    drive(
        schedule,
        lambda turn: ArmReport([run(false_alarms=turn.side is Side.AFTER and turn.number == 0)]),
    )
    assert finding(schedule.findings, "false_alarms").change is NumberChange.REGRESSED


def test_a_side_whose_runs_say_nothing_is_undecided() -> None:
    def make(turn: ArmTurn) -> ArmReport:
        verdict = Verdict.UNKNOWN if turn.side is Side.BEFORE and turn.number else Verdict.PASSED
        return ArmReport([run(verdict=verdict)])

    schedule = VersionSchedule(["one"])
    drive(schedule, make)
    assert [
        (result.change, result.reason) for result in schedule.findings if result.metric == "all"
    ] == [(NumberChange.UNDECIDED, "no conclusive run before")]
    assert {result.metric for result in schedule.findings if result.metric != "all"} == {
        "recovered",
        "lost_steps",
        "false_alarms",
        "losses_equal",
    }


@pytest.mark.parametrize("trouble", ["skipped: no GPU", "failed: chaoskit verdict: unknown"])
def test_what_is_no_assertion_of_the_user_is_no_regression_of_the_test(trouble: str) -> None:
    def make(turn: ArmTurn) -> ArmReport:
        is_odd = turn.side is Side.AFTER and turn.number == 3
        verdict = Verdict.UNKNOWN if is_odd and "verdict" in trouble else Verdict.PASSED
        return ArmReport([run(verdict=verdict)], trouble=trouble if is_odd else "")

    schedule = VersionSchedule(["one"])
    drive(schedule, make)
    assert not [result for result in schedule.findings if result.change is NumberChange.REGRESSED]


def test_an_assertion_of_the_user_that_fails_now_is_a_regression() -> None:
    schedule = VersionSchedule(["one"])
    drive(
        schedule,
        lambda turn: ArmReport(
            [run()], trouble="failed: assert 3 == 4" if turn.side is Side.AFTER else ""
        ),
    )
    result = finding(schedule.findings, "test")
    assert result.change is NumberChange.REGRESSED
    assert "assert 3 == 4" in result.reason


def test_a_number_that_varies_too_much_does_not_decide() -> None:
    chance = random.Random(5)

    def make(turn: ArmTurn) -> ArmReport:
        return ArmReport(
            [run(0.05 * chance.lognormvariate(0, 0.5) * (3 if turn.side is Side.AFTER else 1))]
        )

    schedule = VersionSchedule(["one"], numbers=("recovery",))
    assert len(drive(schedule, make)) == 2 * (LOOKS[-1].runs + 1)
    result = finding(schedule.findings, "recovery")
    assert result.change is NumberChange.UNDECIDED
    assert f"more than {SPREAD_MOST:.0%}" in result.reason


def test_a_number_that_few_runs_have_is_left_out() -> None:
    numbers = iter(range(1000))

    def make(turn: ArmTurn) -> ArmReport:
        return ArmReport([run(0.05 if next(numbers) % 5 == 0 else None)])

    schedule = VersionSchedule(["one"], numbers=("recovery", "step"))
    drive(schedule, make)
    assert {result.metric for result in schedule.findings if result.unit == "s"} == {"step"}


@given(st.floats(0.5, 20), st.floats(-0.4, 0.4))
def test_the_spread_is_that_of_runs_and_not_of_the_day(scale: float, drift: float) -> None:
    chance = random.Random(3)
    noise = [chance.lognormvariate(0, 0.1) for _ in range(200)]
    level = spread([scale * value for value in noise])
    drifting = spread(
        [scale * value * (1 + drift * place / 200) for place, value in enumerate(noise)]
    )
    assert level == pytest.approx(0.1, rel=0.25)
    assert drifting == pytest.approx(level, rel=0.05)


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_that_grew_is_named(phase: str) -> None:
    named = 0
    for seed in range(100):
        chance = random.Random(f"{seed}{phase}")
        before = [phased(chance) for _ in range(14)]
        after = [phased(chance, **{phase: 0.25}) for _ in range(14)]
        named += grown_phase(before, after) == phase
    assert named >= 95


def test_if_all_phases_grew_that_is_said() -> None:
    named = 0
    for seed in range(100):
        chance = random.Random(seed)
        before = [phased(chance) for _ in range(14)]
        after = [
            phased(
                chance, **{name: 0.25 * share for name, share in zip(PHASES, SHARES, strict=True)}
            )
        ]
        after += [
            phased(
                chance, **{name: 0.25 * share for name, share in zip(PHASES, SHARES, strict=True)}
            )
            for _ in range(13)
        ]
        named += grown_phase(before, after) == WHOLE
    assert named >= 95


def test_runs_without_phases_name_none() -> None:
    assert grown_phase([run(0.05)], [run(0.10)]) == ""
    assert grown_phase([], []) == ""


class TestConfirmation:
    """A second session, in which the other version goes first."""

    def schedule(self, factor: float, worse: Sequence[NumberFinding] = ()) -> VersionSchedule:
        chance = random.Random(1)
        schedule = VersionSchedule(["one"], numbers=("recovery", "step"), worse=worse)
        self.taken = drive(
            schedule,
            lambda turn: ArmReport(
                [
                    run(
                        0.05
                        * chance.lognormvariate(0, 0.05)
                        * (factor if turn.side is Side.AFTER else 1)
                    )
                ]
            ),
        )
        return schedule

    def test_what_is_worse_twice_is_regressed(self) -> None:
        first = self.schedule(1.5)
        worse = [result for result in first.findings if needs_confirmation(result)]
        second = self.schedule(1.5, worse)
        assert self.taken[0].side is Side.AFTER
        assert [result.metric for result in second.findings] == [
            "recovery"
        ]  # no other number is inspected
        assert (
            finding(merge_sessions(first.findings, (first, second)), "recovery").change
            is NumberChange.REGRESSED
        )

    def test_what_is_worse_once_is_undecided(self) -> None:
        first = self.schedule(1.5)
        second = self.schedule(
            1.0, [result for result in first.findings if needs_confirmation(result)]
        )
        result = finding(merge_sessions(first.findings, (first, second)), "recovery")
        assert result.change is NumberChange.UNDECIDED
        assert result.reason == "it regressed in one session, and was unchanged in the next"

    def test_what_was_not_run_again_is_undecided(self) -> None:
        first = self.schedule(1.5)
        result = finding(merge_sessions(first.findings, (first, VersionSchedule([]))), "recovery")
        assert result.change is NumberChange.UNDECIDED


def test_a_decision_stays() -> None:
    """A duration that has decided is not tested again while others of its test go on."""
    before = [run(0.05, 0.01)] * 7
    after = [run(0.10, 0.01)] * 7
    findings = decide(before, after, LOOKS[0], numbers=("recovery",))
    assert finding(findings, "recovery").change is NumberChange.REGRESSED
    steps = iter([0.01, 0.0145] * 100)
    schedule = VersionSchedule(["one"], numbers=("recovery", "step"))
    drive(
        schedule,
        lambda turn: ArmReport(
            [run(0.1 if turn.side is Side.AFTER and turn.number < 8 else 0.05, next(steps))]
        ),
    )
    assert finding(schedule.findings, "recovery").change is NumberChange.REGRESSED


def strong(chance: random.Random, times: float, noise: float = 0.02) -> RunRecord:
    """Return a run with a world that was whole again after ``times`` times its recovery."""
    record = run(0.2 * chance.lognormvariate(0, 0.02))
    seconds = record.metrics["recovery"].value * times * chance.lognormvariate(0, noise)
    return msgspec.structs.replace(
        record, metrics=record.metrics | {"full_strength": Metric(seconds, "s", "lower")}
    )


@pytest.mark.parametrize(
    ("times", "noise", "change"),
    [
        ((1.0, 4.0), 0.02, NumberChange.REGRESSED),
        ((4.0, 4.0), 0.02, NumberChange.UNCHANGED),
        (
            (4.0, 4.0),
            0.8,
            NumberChange.INCOMPARABLE,
        ),  # reported with a reason, and no reason to run more often
        ((1.0, 1.0), 0.0, None),
    ],
)
def test_full_strength_behind_the_recovery_is_decided_or_said_why_not(
    times: tuple[float, float], noise: float, change: NumberChange | None
) -> None:
    chance = random.Random(5)
    before, after = (
        [strong(chance, factor, noise) for _ in range(LOOKS[0].runs)] for factor in times
    )
    by_metric = {result.metric: result for result in decide(before, after, LOOKS[0])}
    assert (by_metric["full_strength"].change if "full_strength" in by_metric else None) is change
    assert by_metric["recovery"].change is NumberChange.UNCHANGED
    if change is NumberChange.INCOMPARABLE:
        assert "--number full_strength" in by_metric["full_strength"].reason
