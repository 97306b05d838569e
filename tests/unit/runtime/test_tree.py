"""The canonical tree: every way of folding gives the bits of the plain recursion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaoskit.runtime.reduction.tree import Subtree, folds, maximal_subtrees, merge_order

COUNTS = st.integers(1, 33)


def reference(values: np.ndarray) -> np.ndarray:
    """Return the sum by definition, over leaves padded to a power of two with nothing."""
    nodes: list[np.ndarray | None] = list(values)
    nodes += [None] * ((1 << (len(nodes) - 1).bit_length()) - len(nodes))
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [left if left is None or right is None else left + right for left, right in pairs]
    assert nodes[0] is not None
    return nodes[0]


def fold(shards: list[int], values: np.ndarray) -> dict[Subtree, np.ndarray]:
    """Return the partial sums of a rank after its shards arrived in this order."""
    sums: dict[Subtree, np.ndarray] = {}
    for shard in shards:
        merges = folds(sums, shard, len(values))
        sums[Subtree(shard, shard + 1)] = values[shard]
        for merge in merges:
            sums[merge.parent] = sums.pop(merge.left) + sums.pop(merge.right)
    return sums


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[np.ndarray, list[list[int]]]:
    """Draw values of up to 33 shards, dealt to some ranks in any way, in any order."""
    count = draw(COUNTS)
    world = draw(st.integers(1, count))
    owners = draw(st.lists(st.integers(0, world - 1), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    noise = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = (noise.standard_normal((count, 8)) * 10.0 ** noise.integers(-6, 6, (count, 8))).astype(
        np.float32
    )
    return values, [[shard for shard in order if owners[shard] == rank] for rank in range(world)]


@given(arrivals())
@settings(deadline=None, max_examples=150)
def test_any_ownership_and_arrival_gives_the_reference_bits(
    case: tuple[np.ndarray, list[list[int]]],
) -> None:
    values, ranks = case
    sums: dict[Subtree, np.ndarray] = {}
    for shards in ranks:
        folded = fold(shards, values)
        assert tuple(sorted(folded)) == maximal_subtrees(shards, len(values))
        sums |= folded
    for merge in merge_order(sums, len(values)):
        sums[merge.parent] = sums[merge.left] + sums[merge.right]
    assert sums[Subtree(0, len(values))].tobytes() == reference(values).tobytes()


@given(COUNTS)
def test_in_order_arrival_keeps_few_sums(count: int) -> None:
    held: set[Subtree] = set()
    for shard in range(count):
        merges = folds(held, shard, count)
        held.add(Subtree(shard, shard + 1))
        for merge in merges:
            held -= {merge.left, merge.right}
            held.add(merge.parent)
        assert len(held) <= count.bit_length()
    assert held == {Subtree(0, count)}


def test_clipped_nodes_pass_the_left_half_through() -> None:
    assert maximal_subtrees([4, 5, 6], 7) == (Subtree(4, 7),)
    assert maximal_subtrees([1, 2, 4], 5) == (Subtree(1, 2), Subtree(2, 3), Subtree(4, 5))
    assert [
        merge.parent for merge in merge_order((*maximal_subtrees([0, 1], 3), Subtree(2, 3)), 3)
    ] == [(0, 3)]


def test_impossible_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="already in the sum"):
        folds([Subtree(0, 2)], 1, 4)
    with pytest.raises(ValueError, match="does not exist"):
        folds([], 4, 4)
    with pytest.raises(ValueError, match="do not exist"):
        maximal_subtrees([0, 9], 4)
    with pytest.raises(ValueError, match="no subtree holds shard 3"):
        merge_order([Subtree(0, 2), Subtree(2, 3)], 4)
    with pytest.raises(ValueError, match="overlap"):
        merge_order([Subtree(0, 4), Subtree(1, 2)], 4)
