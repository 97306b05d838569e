"""The flat layout of gradients, and the local sums that outlive a failed reduction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chaoskit.runtime.reduction.gradients import FlatLayout, LocalGradients
from chaoskit.runtime.reduction.tree import Subtree

SHAPES: list[tuple[int, ...]] = [(120, 10), (7,), (0, 3), (90, 10), (), (3, 5), (100, 10)]


def layout(buckets: int = 1) -> FlatLayout:
    return FlatLayout(SHAPES, [torch.float32] * len(SHAPES), torch.device("cpu"), buckets)


def gradients(shard: int, step: int = 0) -> list[torch.Tensor | None]:
    """Return numbers of very different sizes; shard 2 does not use a parameter, and shard 3 has a
    zero of either sign.
    """
    noise = np.random.default_rng([shard, step])
    gradients_of_shard: list[torch.Tensor | None] = [
        torch.tensor(
            noise.standard_normal(shape) * 10.0 ** noise.integers(-4, 4, shape), dtype=torch.float32
        )
        for shape in SHAPES
    ]
    if shard == 2:
        gradients_of_shard[5] = None
    if shard == 3:
        gradients_of_shard[5] = torch.full(SHAPES[5], -0.0)
    return gradients_of_shard


def add_one_bucket(local: LocalGradients, shard: int, bucket: int) -> None:
    values = gradients(shard)
    local.add_bucket(
        shard, bucket, [values[number] for number in local.layout.buckets[bucket].parameters]
    )


def flat_sum(nodes: list[list[int]]) -> bytes:
    """Return the sum over shards, grouped as in ``nodes``: left to right in each group, then over
    the groups.
    """
    groups = []
    for shards in nodes:
        values = [LocalGradients(layout(), 8, buffers=1) for _ in shards]
        for local, shard in zip(values, shards, strict=True):
            local.add(shard, gradients(shard))
        flats = [
            local.sums(0)[Subtree(shard, shard + 1)].numpy()
            for local, shard in zip(values, shards, strict=True)
        ]
        groups.append(sum(flats[1:], flats[0]))
    return np.asarray(sum(groups[1:], groups[0])).tobytes()


def test_layout_is_the_same_whatever_the_buckets() -> None:
    single, three = layout(1), layout(3)
    assert [len(bucket.parameters) for bucket in three.buckets] == [3, 3, 1]
    assert [number for bucket in three.buckets for number in bucket.parameters] == list(
        range(len(SHAPES))
    )[::-1]
    assert [bucket.stop for bucket in three.buckets] == [
        bucket.start for bucket in three.buckets[1:]
    ] + [single.numel]
    flat = torch.arange(single.numel, dtype=torch.float32)
    for left, right in zip(single.views(flat), three.views(flat), strict=True):
        assert torch.equal(left, right)
    assert len(layout(99).buckets) <= len(SHAPES)


@pytest.mark.parametrize("buckets", [1, 3])
def test_local_sums_survive_changes_and_repeat_their_bits(buckets: int) -> None:
    local = LocalGradients(layout(buckets), 5)
    for shard in (3, 0, 1):
        local.add(shard, gradients(shard))
    assert local.shards() == (0, 1, 3)
    assert local.discard(1) == (0,)
    assert local.discard(1) == ()
    assert local.keep([3, 4]) == (4,)
    with pytest.raises(ValueError, match="already"):
        local.add(3, gradients(3))
    with pytest.raises(ValueError, match="shape"):
        local.add(4, gradients(4)[::-1])
    for shard in (2, 4, 1, 0):
        local.add(shard, gradients(shard))
    whole = b"".join(
        local.sums(bucket)[Subtree(0, 5)].numpy().tobytes() for bucket in range(buckets)
    )
    four = np.frombuffer(flat_sum([[0, 1], [2, 3]]), np.float32)
    assert whole == (four + np.frombuffer(flat_sum([[4]]), np.float32)).tobytes()


def test_a_shard_that_stays_incomplete_takes_its_siblings_with_it() -> None:
    local = LocalGradients(layout(3), 2)
    local.add(0, gradients(0))
    add_one_bucket(local, 1, 0)
    assert (local.has(0), local.has(1), local.pending(1)) == (False, False, (1, 2))
    assert list(local.sums(0)) == [Subtree(0, 2)]
    assert list(local.sums(1)) == []
    with pytest.raises(ValueError, match="has bucket 0"):
        local.add(1, gradients(1))
    assert local.keep([0, 1]) == (0, 1)
    for shard in (1, 0):
        local.add(shard, gradients(shard))
    assert local.shards() == (0, 1)


def test_steps_reuse_their_buffers() -> None:
    local = LocalGradients(layout(), 8)
    places = []
    for step in range(3):
        local.clear()
        for shard in range(8):
            local.add(shard, gradients(shard, step=step))
        places.append(local.sums(0)[Subtree(0, 8)].data_ptr())
    assert len(set(places)) <= 3
    assert len(local._free_sums) == 2
