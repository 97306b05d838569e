"""Positions in a dataset are computed, never replayed."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from chaoskit.data import Permutation, Positions
from chaoskit.errors import BadInput

pytestmark = pytest.mark.costly

# -- positions -------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None, database=None)
@given(size=st.integers(1, 3000), key=st.lists(st.integers(0, 2**63), max_size=3))
def test_a_permutation_has_everything_once(size: int, key: list[int]) -> None:
    """The range may be just above or below a power of two."""
    assert sorted(Permutation(size, *key)(np.arange(size))) == list(range(size))


@settings(max_examples=50, deadline=None, database=None)
@given(size=st.integers(2**33, 2**62), key=st.integers(0, 2**63))
def test_places_of_a_huge_one_are_computed_alone(size: int, key: int) -> None:
    """The permutation cannot be checked whole: these places have distinct values within the range,
    in any order of access.
    """
    order, places = (
        Permutation(size, key),
        np.unique(np.linspace(0, size - 1, 1000).astype(np.int64) % size),
    )
    values = order(places)
    assert len(np.unique(values)) == len(places)
    assert values.min() >= 0
    assert values.max() < size
    assert np.array_equal(order(places[::7]), values[::7])


def too_far(counts: list[int], expected: float, freedom: int) -> bool:
    """Return whether chi-square is more than six deviations above its mean."""
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return chi_square > freedom + 6 * math.sqrt(2 * freedom)


def test_every_order_is_as_likely() -> None:
    """The permutation has five elements, so that each of the 120 orders can be counted."""
    counts = Counter(tuple(Permutation(5, seed)(np.arange(5))) for seed in range(6000))
    assert not too_far([counts[order] for order in itertools.permutations(range(5))], 50, 119)


@pytest.mark.parametrize("size", [33, 64, 100])
def test_every_sample_is_as_likely_at_every_place(size: int) -> None:
    """The distance of two successive samples is equally likely, too."""
    places, rounds = np.arange(size), 2000
    counts, distances = np.zeros((size, size), int), np.zeros(size, int)
    for epoch in range(rounds):
        order = Permutation(size, 7, epoch)(places)
        counts[places, order] += 1
        np.add.at(distances, np.diff(order) % size, 1)
    assert not too_far(counts.ravel().tolist(), rounds / size, (size - 1) ** 2)
    assert not too_far(distances[1:].tolist(), rounds, size - 2)


def test_the_order_is_part_of_what_a_run_is() -> None:
    """A run that is continued by a later version, on another machine, goes on in the same order."""
    assert Permutation(1000, 1, 2)(np.arange(5)).tolist() == GOLDEN


GOLDEN = [576, 116, 897, 677, 229]


@pytest.mark.slow
@pytest.mark.promise("Which samples belong to a step is computed")
@settings(max_examples=examples(100), deadline=None, database=None)
@given(
    part=st.integers(1, 4),
    world=st.integers(1, 4),
    more=st.integers(0, 50),
    seed=st.integers(0, 2**63),
)
def test_a_batch_does_not_depend_on_the_world(part: int, world: int, more: int, seed: int) -> None:
    """Ranks take equal parts.

    Three epochs deal every sample three times, in any order of access.
    """
    batch_size = part * world
    size = batch_size + more
    alone, together = Positions(size, batch_size, seed), Positions(size, batch_size, seed)
    steps = -(-3 * size // batch_size)
    batches = [alone.batch(step) for step in range(steps)]
    for step in reversed(range(steps)):
        parts = [together.batch(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), batches[step])
    dealt = np.concatenate(batches)
    for epoch in range(3):
        assert sorted(dealt[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_positions_refuse_what_they_cannot_deal() -> None:
    with pytest.raises(BadInput, match="at least one global batch"):
        Positions(7, 8)
    with pytest.raises(BadInput, match="1 or more"):
        Positions(7, 0)
    with pytest.raises(BadInput, match="multiple of the number of ranks, 3"):
        Positions(80, 8).batch(0, 0, 3)
    with pytest.raises(BadInput, match="use 0 to 1"):
        Positions(80, 8).batch(0, 2, 2)
