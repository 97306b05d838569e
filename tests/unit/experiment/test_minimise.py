"""Searches that minimise failing plans, driven by oracles that know the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.experiment.shrink.minimise import Search, ddmin, descend, minimise
from chaoskit.experiment.shrink.proportion import repeats_for, wilson_interval


def drive(search: Search[Any], fails: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return the result of a search, and all candidates that it asked about."""
    candidates = []
    try:
        candidate = next(search)
        while True:
            candidates.append(candidate)
            candidate = search.send(fails(candidate))
    except StopIteration as end:
        return end.value, candidates


SIZES = st.integers(0, 24)


@settings(deadline=None)
@given(size=SIZES, needed=st.sets(st.integers(0, 23)))
def test_ddmin_finds_exactly_what_matters(size: int, needed: set[int]) -> None:
    """Exactly the needed faults are left, in their order, if a plan fails exactly when it holds
    them.
    """
    needed = {item for item in needed if item < size}
    result, candidates = drive(ddmin(range(size)), lambda candidate: needed <= set(candidate))
    assert result == tuple(sorted(needed))
    assert len(candidates) == len(set(candidates))  # no candidate is asked about twice
    assert len(candidates) <= size * size + 3 * size + 1  # Zeller's bound


@settings(deadline=None)
@given(size=st.integers(1, 9), chance=st.randoms(use_true_random=False))
def test_ddmin_is_one_minimal_for_any_oracle(size: int, chance: random.Random) -> None:
    """More faults may hide a failure: the remaining set fails, and without any one of its items it
    does not.
    """
    outcomes: dict[tuple[int, ...], bool] = {tuple(range(size)): True}

    def fails(candidate: tuple[int, ...]) -> bool:
        return outcomes.setdefault(candidate, chance.random() < 0.3)

    result, _ = drive(ddmin(range(size)), fails)
    assert outcomes[result]
    assert not any(
        outcomes.get(result[:place] + result[place + 1 :], False) for place in range(len(result))
    )
    assert all(result[:place] + result[place + 1 :] in outcomes for place in range(len(result)))


def test_equal_items_are_two_things() -> None:
    """A failure may take the same fault twice."""
    result, _ = drive(
        ddmin(["kill", "hang", "kill"]), lambda candidate: candidate.count("kill") == 2
    )
    assert result == ("kill", "kill")


@settings(deadline=None)
@given(
    start=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    floor=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_descend_stops_where_nothing_simpler_fails(
    start: tuple[int, int], floor: tuple[int, int]
) -> None:
    floor = (min(start[0], floor[0]), min(start[1], floor[1]))
    search = descend(start, _fewer, key=lambda pair: pair)
    result, candidates = drive(search, lambda pair: pair[0] >= floor[0] and pair[1] >= floor[1])
    assert result == floor
    assert len(candidates) == len(set(candidates))


def _fewer(pair: tuple[int, int]) -> list[tuple[int, int]]:
    first, second = pair
    halves = [(first // 2, second), (first, second // 2), (first - 1, second), (first, second - 1)]
    return [half for half in halves if min(half) >= 0 and half != pair]


@settings(deadline=None)
@given(
    size=st.integers(2, 10),
    needed=st.sets(st.integers(0, 9), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_a_flaky_failure_never_loses_what_matters(size: int, needed: set[int], seed: int) -> None:
    """An oracle that fails only now and then never makes the search keep too little: the kept plan
    did fail.
    """
    needed = {item % size for item in needed}
    chance = random.Random(seed)
    result, _ = drive(ddmin(range(size)), _flaky(needed, 0.5, 4, chance))
    assert needed <= set(result)


@pytest.mark.parametrize("rate", [1.0, 0.6, 0.35])
def test_repeats_follow_the_failure_rate(rate: float) -> None:
    """Most (seeded) searches end at exactly the needed items, with as many repeats as the rate asks
    for.
    """
    exact = 0
    for seed in range(100):
        chance = random.Random(seed)
        trials = 10
        hits = sum(chance.random() < rate for _ in range(trials))
        repeats = repeats_for(max(1, hits), trials)
        result, _ = drive(ddmin(range(6)), _flaky({1, 4}, rate, repeats, chance))
        exact += set(result) == {1, 4}
    once = sum(
        set(drive(ddmin(range(6)), _flaky({1, 4}, rate, 1, random.Random(seed)))[0]) == {1, 4}
        for seed in range(100)
    )
    assert exact >= 75
    assert exact > once or rate == 1.0  # without repeats a flaky failure is lost on the way


def _flaky(
    needed: set[int], rate: float, repeats: int, chance: random.Random
) -> Callable[[Sequence[int]], bool]:
    return lambda candidate: (
        needed <= set(candidate) and any(chance.random() < rate for _ in range(repeats))
    )


@settings(deadline=None)
@given(
    items=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    extra=st.integers(0, 9),
    data=st.data(),
)
def test_minimise_leaves_out_and_then_simplifies(
    items: list[int], extra: int, data: st.DataObject
) -> None:
    """A plan of numbers with a setting fails while the number at the chosen place is at least 3."""
    items[data.draw(st.integers(0, len(items) - 1))] = 20
    start = (tuple(items), extra)

    def simpler(plan: tuple[tuple[int, ...], int]) -> list[tuple[tuple[int, ...], int]]:
        numbers, setting = plan
        fewer = [
            ((*numbers[:place], number - 1, *numbers[place + 1 :]), setting)
            for place, number in enumerate(numbers)
            if number
        ]
        return [(numbers, 0), *fewer] if setting else fewer

    search = minimise(
        start,
        lambda plan: plan[0],
        lambda plan, kept: (tuple(kept), plan[1]),
        simpler,
        key=lambda plan: plan,
    )
    result, _ = drive(search, lambda plan: any(number >= 3 for number in plan[0]))
    assert result == ((3,), 0)


# -- proportions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (3, 10, 0.1078, 0.6032),
        (8, 10, 0.4902, 0.9433),
        (10, 10, 0.7225, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_intervals_known_from_tables(
    hits: int, trials: int, low: float, high: float
) -> None:
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=5e-5)


@settings(deadline=None)
@given(
    st.integers(0, 300).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))
)
def test_an_interval_holds_what_was_seen(seen: tuple[int, int]) -> None:
    hits, trials = seen
    low, high = wilson_interval(hits, trials)
    assert 0 <= low <= high <= 1
    if trials:
        assert low <= hits / trials <= high
        wider = wilson_interval(hits, 2 * trials)
        assert (
            wilson_interval(2 * hits, 2 * trials)[1] - wilson_interval(2 * hits, 2 * trials)[0]
            < high - low
        )
        assert wider[1] <= high + 1e-12


@settings(deadline=None)
@given(
    st.integers(1, 30).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))
)
def test_rarer_failures_need_more_repeats(seen: tuple[int, int]) -> None:
    hits, trials = seen
    repeats = repeats_for(hits, trials, repeats_max=10**6)
    rate = (hits + 1) / (trials + 2)
    assert (1 - rate) ** repeats <= 0.05 < (1 - rate) ** (repeats - 1)
    assert repeats_for(hits, trials) <= 12
    assert hits == 0 or repeats_for(hits - 1, trials) >= repeats_for(hits, trials)
