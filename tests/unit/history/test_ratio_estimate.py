"""Ratios of two small samples by ranks, checked against every order of the values."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.history.ratio_estimate import EXACT_MOST, estimate_ratio
from chaoskit.history.shares import more_by_chance

VALUES = st.floats(0.01, 100.0)


def probability_of_wins(before: int, after: int, wins: int) -> float:
    """Return the probability of at least ``wins`` wins, by counting all orders of the values."""
    places = range(before + after)
    wins_of_orders = []
    for early in combinations(places, before):
        late = [place for place in places if place not in early]
        wins_of_orders.append(
            sum(late_place > early_place for late_place in late for early_place in early)
        )
    return sum(count >= wins for count in wins_of_orders) / len(wins_of_orders)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 5), (4, 6)])
def test_probabilities_are_those_of_all_orders(before: int, after: int) -> None:
    chance = random.Random(before * 10 + after)
    for _ in range(20):
        values = chance.sample(range(1, 100), before + after)
        early, late = values[:before], values[before:]
        wins = sum(late_value > early_value for late_value in late for early_value in early)
        estimate = estimate_ratio(
            [float(value) for value in early], [float(value) for value in late]
        )
        assert estimate.greater == pytest.approx(probability_of_wins(before, after, wins))
        assert estimate.smaller == pytest.approx(
            probability_of_wins(before, after, before * after - wins)
        )


@given(st.lists(VALUES, min_size=1, max_size=8), st.lists(VALUES, min_size=1, max_size=8))
def test_the_other_way_round_it_is_the_inverse(before: list[float], after: list[float]) -> None:
    there, back = estimate_ratio(before, after), estimate_ratio(after, before)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.greater == pytest.approx(back.smaller)
    assert there.low <= there.ratio <= there.high


@pytest.mark.parametrize(
    ("size", "confidence"), [(5, 0.9), (7, 0.9), (14, 0.95), (EXACT_MOST + 5, 0.9)]
)
def test_the_interval_keeps_its_promise(size: int, confidence: float) -> None:
    """The values are log-normal as those of recoveries, one in twenty of which is slow, with a true
    ratio of 1.2.
    """
    chance, tries, inside = random.Random(size), 1000, 0

    def sample(by: float) -> list[float]:
        return [
            by * math.exp(chance.gauss(0, 0.1)) * chance.choice([1] * 19 + [2]) for _ in range(size)
        ]

    for _ in range(tries):
        estimate = estimate_ratio(sample(1.0), sample(1.2), confidence)
        inside += estimate.low <= 1.2 <= estimate.high
    assert inside / tries > confidence - 3 * math.sqrt(confidence * (1 - confidence) / tries)


def test_a_few_values_have_no_interval() -> None:
    estimate = estimate_ratio([1.0, 1.1], [2.0, 2.1])
    assert (estimate.low, estimate.high) == (0.0, math.inf)
    assert estimate.greater == pytest.approx(1 / 6)


def test_one_slow_run_moves_little() -> None:
    """The estimate moves little; a mean would have grown by half."""
    assert estimate_ratio([1.0, 1.01, 1.02, 1.03], [1.0, 1.01, 1.02, 3.0]).ratio < 1.02


@pytest.mark.parametrize("before", range(1, 7))
@pytest.mark.parametrize("after", range(1, 7))
def test_a_share_that_is_greater_by_chance_is_counted(before: int, after: int) -> None:
    """The chance is compared with all distributions of the misses."""
    for early, late in product(range(before + 1), range(after + 1)):
        misses = early + late
        ways = [
            sum(place >= before for place in chosen)
            for chosen in combinations(range(before + after), misses)
        ]
        expected = sum(late_misses >= late for late_misses in ways) / len(ways)
        assert more_by_chance(early, before, late, after) == pytest.approx(expected)


@pytest.mark.parametrize(("before", "after"), [(31, 1), (31, 5), (40, 20)])
def test_of_many_values_none_is_called_too_improbable(before: int, after: int) -> None:
    """The normal distribution replaces counting; it is never smaller than the exact one where that
    decides.
    """
    exact = exact_tails(before, after)
    for wins in range(before * after + 1):
        if exact[wins] <= 0.01:
            probability = estimate_ratio(*values_with(before, after, wins)).greater
            assert probability >= exact[wins] * 0.99


def exact_tails(before: int, after: int) -> list[float]:
    """Return the probabilities of at least so many wins, by adding values successively."""
    table = {(0, after_): [1] for after_ in range(after + 1)} | {
        (before_, 0): [1] for before_ in range(before + 1)
    }
    for early in range(1, before + 1):
        for late in range(1, after + 1):
            ways_by_wins = [0] * (early * late + 1)
            for wins, ways in enumerate(table[early, late - 1]):
                ways_by_wins[wins + early] += ways
            for wins, ways in enumerate(table[early - 1, late]):
                ways_by_wins[wins] += ways
            table[early, late] = ways_by_wins
    total = math.comb(before + after, before)
    ways = table[before, after]
    return [sum(ways[wins:]) / total for wins in range(before * after + 1)]


def values_with(before: int, after: int, wins: int) -> tuple[list[float], list[float]]:
    """Return two samples of which the later one wins ``wins`` pairs."""
    full, rest = divmod(wins, before)
    early = [float(place + 1) for place in range(before)]
    late = [float(before + 1 + number) for number in range(full)]
    late += [rest + 0.5] if full < after else []
    late += [0.1 / (number + 1) for number in range(after - len(late))]
    return early, late


@pytest.mark.parametrize(
    ("before", "after"),
    [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0]), ([1.0], [math.inf])],
)
def test_what_has_no_ratio_is_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sample|values"):
        estimate_ratio(before, after)
