"""The confidence of recovery: the interval, the quantiles, and the runs that form an experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.experiment.shrink.proportion import wilson_interval
from chaoskit.report.statistics import estimate_recovery, group_title, quantile
from chaoskit.report.summary import recovery_sentence
from chaoskit.runlog.outcome import FaultRecord, Ledger, Outcome, Recovery
from chaoskit.vocabulary import Verdict

Z_95 = 1.959963984540054
KILL = "Kill(rank=2, at_step=20)"


def recovery(seconds: float) -> Recovery:
    return Recovery(
        cause="rank 2: killed",
        fault=KILL,
        injected_s=1.0,
        generation=2,
        world=4,
        spans=[],
        seconds=seconds,
        full_strength_seconds=seconds,
        step_seconds=0.1,
    )


def outcome(
    verdict: Verdict = Verdict.PASSED,
    *seconds: float,
    name: str = "kill",
    faults: Sequence[str] = (KILL,),
    **rest: Any,
) -> Outcome:
    settings = {
        "job": "gpt",
        "substrate": "local",
        "nodes": 4,
        "spares": 1,
        "seed": 0,
        "reduction": "exact",
    } | rest
    return Outcome(
        name=name,
        started="2026-03-02T10:15:00+00:00",
        wall_s=1.0,
        verdict=verdict,
        reasons=[],
        steps=[],
        faults=[FaultRecord(fault=text, kind=text.partition("(")[0]) for text in faults],
        recoveries=[recovery(duration_s) for duration_s in seconds],
        ledger=Ledger(steps=0, samples=0),
        lost_steps=0,
        **settings,
    )


counts = st.integers(1, 5000).flatmap(
    lambda trials: st.tuples(st.integers(0, trials), st.just(trials))
)


class TestInterval:
    @pytest.mark.parametrize(
        ("hits", "trials", "low", "high"),
        [  # R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ],
    )
    def test_known_values(self, hits: int, trials: int, low: float, high: float) -> None:
        assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=5e-5)

    @given(counts)
    def test_its_ends_are_where_the_score_test_turns(self, count: tuple[int, int]) -> None:
        """Wilson's definition: all p for which ``|hits/trials - p| <= z sqrt(p (1 - p) /
        trials)``.
        """
        hits, trials = count
        for end in wilson_interval(hits, trials):
            if 0 < end < 1:
                assert abs(hits / trials - end) == pytest.approx(
                    Z_95 * math.sqrt(end * (1 - end) / trials), rel=1e-6
                )

    @given(counts)
    def test_it_holds_the_share_and_lies_between_0_and_1(self, count: tuple[int, int]) -> None:
        hits, trials = count
        low, high = wilson_interval(hits, trials)
        assert 0 <= low <= hits / trials <= high <= 1
        assert low < high

    @given(counts)
    def test_successes_and_failures_are_mirror_images(self, count: tuple[int, int]) -> None:
        hits, trials = count
        low, high = wilson_interval(hits, trials)
        assert wilson_interval(trials - hits, trials) == pytest.approx((1 - high, 1 - low))

    @given(counts)
    def test_more_of_the_same_makes_it_narrower(self, count: tuple[int, int]) -> None:
        hits, trials = count
        (low, high), (lower, upper) = (
            wilson_interval(4 * hits, 4 * trials),
            wilson_interval(hits, trials),
        )
        assert high - low < upper - lower


class TestQuantile:
    @given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
    def test_it_is_the_first_measured_value_that_enough_do_not_exceed(
        self, values: list[float], part: float
    ) -> None:
        measured = quantile(values, part)
        assert measured in values
        assert sum(value <= measured for value in values) >= part * len(values)
        assert measured == min(values) or sum(value < measured for value in values) < part * len(
            values
        )

    def test_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="no values"):
            quantile([], 0.5)


class TestEstimate:
    def test_repeats_are_one_experiment_whatever_their_seed(self) -> None:
        runs = [outcome(Verdict.PASSED, seconds, name=f"kill[repeat{seed}]", seed=seed) for seed, seconds in
                enumerate((0.3, 0.1, 0.2))]  # fmt: skip
        (experiment,) = estimate_recovery([*runs, outcome(Verdict.FAILED, 9.0)]).experiments
        assert (
            experiment.recovered,
            experiment.tried,
            experiment.probability,
            experiment.runs,
        ) == (3, 4, 0.75, 4)
        assert (experiment.low, experiment.high) == wilson_interval(3, 4)
        assert (experiment.p50_s, experiment.p95_s, experiment.max_s, experiment.recoveries) == (
            0.2,
            None,
            0.3,
            3,
        )
        assert (experiment.job, experiment.faults) == ("gpt", [KILL])

    @pytest.mark.parametrize(("count", "p95_s"), [(19, None), (20, 19.0)])
    def test_a_p95_needs_twenty_values(self, count: int, p95_s: float | None) -> None:
        """A p95 of fewer values would be the greatest; the words then name the worst value only."""
        total = estimate_recovery(
            outcome(Verdict.PASSED, float(number)) for number in range(1, count + 1)
        ).total
        assert (total.p95_s, total.max_s) == (p95_s, float(count))
        assert f"worst of {count} {count} s" in recovery_sentence(total)
        assert ("p95 19 s" in recovery_sentence(total)) == (p95_s is not None)

    @pytest.mark.parametrize(
        "other",
        [
            {"job": "resnet"},
            {"nodes": 3},
            {"spares": 0},
            {"reduction": "fast"},
            {"stack": "torchrun"},
            {"substrate": "docker"},
            {"settings": {"shards": 8}},
            {"faults": [KILL, KILL]},
            {"faults": ["Kill(rank=1, at_step=20)"]},
        ],
    )
    def test_another_plan_or_setting_is_another_experiment(self, other: dict[str, Any]) -> None:
        estimate = estimate_recovery([outcome(), outcome(**other)])
        assert [experiment.runs for experiment in estimate.experiments] == [1, 1]
        assert estimate.total.tried == 2

    def test_what_says_nothing_about_recovery_counts_neither_for_nor_against(self) -> None:
        meant_to_fail = outcome(Verdict.FAILED, claimed=False)
        runs = [
            outcome(Verdict.PASSED, 0.5),
            outcome(Verdict.UNKNOWN, 7.0),
            outcome(Verdict.ERROR),
            meant_to_fail,
        ]
        total = estimate_recovery(runs).total
        assert (total.recovered, total.tried, total.runs) == (1, 1, 4)
        assert (total.unknown, total.errors, total.unclaimed) == (1, 1, 1)
        assert total.max_s == 0.5

    def test_nothing_was_broken(self) -> None:
        estimate = estimate_recovery([outcome(faults=[])])
        assert estimate.experiments == []
        assert (estimate.total.runs, estimate.total.probability, estimate.total.p50_s) == (
            0,
            None,
            None,
        )
        assert (estimate.total.low, estimate.total.high) == (0.0, 1.0)

    @pytest.mark.parametrize(
        ("names", "shown"),
        [
            (["kill[repeat0]", "kill[repeat11]"], "kill"),
            (["kill[forward-repeat0]", "kill[forward-repeat1]"], "kill[forward]"),
            (["kill[repeat0-forward] #2"], "kill[forward] #2"),
            (["kill[a-repeat1-b]"], "kill[a-b]"),
            (["one", "two", "one", "three"], "one (and 2 other names)"),
        ],
    )
    def test_the_number_of_a_repeat_is_no_part_of_the_name(
        self, names: list[str], shown: str
    ) -> None:
        assert group_title([outcome(name=name) for name in names]) == shown
