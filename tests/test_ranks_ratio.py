"""Ratios of two small samples by ranks, beside every order of the values."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.history.ranks import EXACT_MOST, estimate_ratio, least_for

VALUES = st.floats(0.01, 100.0)


def probability_of_wins(before: int, after: int, wins: int) -> float:
    """Of as many wins or more, by counting all orders of so many values."""
    places = range(before + after)
    found = []
    for early in combinations(places, before):
        late = [place for place in places if place not in early]
        found.append(sum(one > other for one in late for other in early))
    return sum(one >= wins for one in found) / len(found)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 5), (4, 6)])
def test_probabilities_are_those_of_all_orders(before: int, after: int) -> None:
    chance = random.Random(before * 10 + after)
    for _ in range(20):
        values = chance.sample(range(1, 100), before + after)
        early, late = values[:before], values[before:]
        wins = sum(one > other for one in late for other in early)
        found = estimate_ratio([float(one) for one in early], [float(one) for one in late])
        assert found.greater == pytest.approx(probability_of_wins(before, after, wins))
        assert found.smaller == pytest.approx(probability_of_wins(before, after, before * after - wins))


@given(st.lists(VALUES, min_size=1, max_size=8), st.lists(VALUES, min_size=1, max_size=8))
def test_the_other_way_round_it_is_the_inverse(before: list[float], after: list[float]) -> None:
    there, back = estimate_ratio(before, after), estimate_ratio(after, before)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.greater == pytest.approx(back.smaller)
    assert there.low <= there.ratio <= there.high


@pytest.mark.parametrize(("size", "confidence"), [(5, 0.9), (7, 0.9), (14, 0.95), (EXACT_MOST + 5, 0.9)])
def test_the_interval_keeps_its_promise(size: int, confidence: float) -> None:
    """Log-normal values as those of recoveries, one in twenty of which is slow, and a true ratio of 1.2."""
    chance, tries, inside = random.Random(size), 1000, 0

    def sample(by: float) -> list[float]:
        return [by * math.exp(chance.gauss(0, 0.1)) * chance.choice([1] * 19 + [2]) for _ in range(size)]

    for _ in range(tries):
        found = estimate_ratio(sample(1.0), sample(1.2), confidence)
        inside += found.low <= 1.2 <= found.high
    assert inside / tries > confidence - 3 * math.sqrt(confidence * (1 - confidence) / tries)


def test_a_few_values_have_no_interval() -> None:
    found = estimate_ratio([1.0, 1.1], [2.0, 2.1])
    assert (found.low, found.high) == (0.0, math.inf)
    assert found.greater == pytest.approx(1 / 6)


def test_one_slow_run_moves_little() -> None:
    """A mean would have grown by half."""
    assert estimate_ratio([1.0, 1.01, 1.02, 1.03], [1.0, 1.01, 1.02, 3.0]).ratio < 1.02


@pytest.mark.parametrize(("probability", "size"), [(0.05, 3), (0.01, 5), (0.001, 7)])
def test_how_many_values_it_takes(probability: float, size: int) -> None:
    assert least_for(probability) == size


@pytest.mark.parametrize(
    ("before", "after"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0]), ([1.0], [math.inf])]
)
def test_what_has_no_ratio_is_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sample|values"):
        estimate_ratio(before, after)
