"""Tests of the reductions, between real processes over real gloo."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import ranks
from support.ranks import Line
from support.waiting import wait_until
from torch import nn
from torch.distributed import FileStore

from chaoskit.config import RunConfig
from chaoskit.job import resolve_job
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.reduction.choice import (
    CorruptSegment,
    DoubtfulSum,
    FlatLayout,
    LocalGradients,
    Reduced,
    make_reducer,
)
from chaoskit.runtime.reduction.tree import Subtree
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.step.shardwork import ShardWork

# Some parameters are in several cache blocks, others are smaller than the alignment, one is empty.
SHAPES: list[tuple[int, ...]] = [(120, 1001), (7,), (0, 3), (90, 999), (), (33, 65), (100, 1000)]
CPU = torch.device("cpu")
OWNERSHIPS = {
    (4, 1): [[0, 1, 2, 3]],
    (4, 2): [[0, 3], [1, 2]],
    (4, 3): [[0, 1], [2], [3]],
    (4, 4): [[0], [1], [2], [3]],
    (5, 1): [[0, 1, 2, 3, 4]],
    (5, 2): [[0, 1, 2], [3, 4]],
    (5, 3): [[4, 1], [0, 3], [2]],
    (5, 4): [[0], [1], [2, 3], [4]],
    (8, 1): [[7, 6, 5, 4, 3, 2, 1, 0]],
    (8, 2): [[0, 2, 4, 6], [1, 3, 5, 7]],
    (8, 3): [[0, 1, 2], [3, 4, 5], [6, 7]],
    (8, 4): [[0, 1], [2, 3], [4, 5], [6, 7]],
}


_never_freed: list[Group] = []


class Gloo(Group):
    """The product's group, which is never freed: freeing waits for the transfers that gloo forgot
    at an abort.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        # a rank that no abort frees exceeds the limit of its test
        super().__init__(
            FileStore(str(path), size), rank, size, CPU, address="127.0.0.1", timeout_s=600.0
        )
        _never_freed.append(self)


class DiesBeforeTransfer(Gloo):
    """Kills its process, for real, instead of starting its n-th transfer."""

    transfers_left: int

    def _count(self) -> None:
        self.transfers_left -= 1
        if self.transfers_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        self._count()
        return super().send(tensor, rank, tag)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self._count()
        return super().all_reduce(tensor)


def gradients(
    shard: int, dtype: torch.dtype = torch.float32, step: int = 0
) -> list[torch.Tensor | None]:
    """Return gradients of very different sizes, so that the order of additions shows. Shard 2 does
    not use one parameter.
    """
    noise = np.random.default_rng([shard, step])
    values = [
        noise.standard_normal(shape) * 10.0 ** noise.integers(-4, 4, shape) for shape in SHAPES
    ]
    tensors: list[torch.Tensor | None] = [torch.tensor(numbers).to(dtype) for numbers in values]
    if shard == 2:
        tensors[5] = None
    return tensors


def tree_sum(count: int, dtype: type = np.float32, step: int = 0) -> list[np.ndarray]:
    """Return the reference sum of every parameter, by plain recursion in numpy."""

    def leaf(shard: int, number: int) -> np.ndarray:
        gradient = gradients(shard, step=step)[number]
        return (
            np.zeros(SHAPES[number], dtype) if gradient is None else gradient.numpy().astype(dtype)
        )

    def node(lo: int, span: int, number: int) -> np.ndarray:
        if span == 1:
            return leaf(lo, number)
        left = node(lo, span // 2, number)
        return left + node(lo + span // 2, span // 2, number) if lo + span // 2 < count else left

    return [node(0, 1 << (count - 1).bit_length(), number) for number in range(len(SHAPES))]


def bits(tensors: Sequence[torch.Tensor] | Sequence[np.ndarray]) -> list[bytes]:
    return [np.asarray(tensor).tobytes() for tensor in tensors]


def layout(buckets: int = 1) -> FlatLayout:
    return FlatLayout(SHAPES, [torch.float32] * len(SHAPES), CPU, buckets)


def contribution(
    shards: Sequence[int], count: int, buckets: int = 1, step: int = 0
) -> LocalGradients:
    local = LocalGradients(layout(buckets), count)
    for shard in shards:
        local.add(shard, gradients(shard, step=step))
    return local


SIDECAR = [float("nan"), -0.0, 5e-324, float("-inf"), 0.1]


def sidecar(rank: int) -> list[float]:
    return [*SIDECAR, rank / 3]


def check_news(reduced: Reduced, world: int) -> None:
    assert reduced.finite
    assert reduced.nonfinite == ()
    assert [row.numpy().tobytes() for row in reduced.sidecars] == [
        np.array(sidecar(r)).tobytes() for r in range(world)
    ]


def reduce_everything(
    line: Line, path: Path, expected: dict[int, list[np.ndarray]], grad_sums: dict[int, int]
) -> None:
    rank, world = line.rank, line.size
    group = Gloo(path / "store", rank, world) if world > 1 else None
    for count, expected_sums in expected.items():
        ownership = OWNERSHIPS[count, world]
        for buckets in (1, 3):
            local = contribution(ownership[rank], count, buckets)
            exact, fast = (make_reducer(kind, local, len(sidecar(0))) for kind in ("exact", "fast"))
            exact.begin(group, ownership)
            for _ in range(2):
                reduced = exact.reduce(sidecar(rank))
                assert bits(reduced.gradients) == bits(expected_sums)
                assert reduced.grad_sum == grad_sums[count]
                check_news(reduced, world)
            fast.begin(group, ownership)
            reduced = fast.reduce(sidecar(rank))
            for result, expected_sum in zip(reduced.gradients, expected_sums, strict=True):
                np.testing.assert_allclose(result, expected_sum, rtol=1e-4, atol=1e-2)
            check_news(reduced, world)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_world_gives_the_same_bits(world: int, tmp_path: Path) -> None:
    """The exact reduction gives the bits of the reference tree in every world, the fast one about
    the same numbers.
    """
    counts = [count for count, size in OWNERSHIPS if size == world]
    expected = {count: tree_sum(count) for count in counts}
    exact_sums = {
        count: contribution(range(count), count).sums(0)[Subtree(0, count)] for count in counts
    }
    grad_sums = {count: int(total.view(torch.int64).sum()) for count, total in exact_sums.items()}

    assert ranks.results(world, reduce_everything, tmp_path, expected, grad_sums) == [None] * world


def poison(shard: int, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Put a NaN into shard 1 and an infinity into another parameter of shard 4."""
    if shard in (1, 4):
        target = tensors[5 if shard == 1 else 0]
        assert target is not None
        target.view(-1)[-1] = float("nan") if shard == 1 else float("inf")
    return tensors


def reduce_poison(line: Line, path: Path, kind: Any) -> None:
    rank, ownership = line.rank, [[0, 1], [2], [3, 4]]
    local = LocalGradients(layout(2), 5)
    for shard in ownership[rank]:
        local.add(shard, poison(shard, gradients(shard)))
    reducer = make_reducer(kind, local, 0)
    reducer.begin(Gloo(path / "store", rank, 3), ownership)
    reduced = reducer.reduce([])
    assert not reduced.finite
    assert reduced.nonfinite == ((0, Subtree(0, 2)), (2, Subtree(4, 5)))
    assert reduced.guilty == {0: (0, 1), 2: (4,)}
    local.clear()
    for shard in ownership[rank]:
        local.add(shard, gradients(shard))
    assert reducer.reduce([]).finite


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_nonfinite_contributions_are_known_by_rank(kind: Any, tmp_path: Path) -> None:
    """All ranks know which ones contributed a non-finite number, and which shards it may be in."""
    assert ranks.results(3, reduce_poison, tmp_path, kind) == [None] * 3


class Damages(Gloo):
    """A group that inverts one bit of another rank's segment after it was received."""

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        work = super().recv(tensor, rank, tag)
        if tag != 5:  # V = 4: the finished segments of bucket 0
            return work

        class Damaged:
            def wait(self) -> None:
                work.wait()
                tensor.view(torch.int32)[-1] ^= 1

        return Damaged()


def reduce_damaged_segment(line: Line, path: Path, expected: list[np.ndarray]) -> None:
    rank, ownership = line.rank, [[0, 2], [1, 3]]
    make_group = Damages if rank else Gloo
    reducer = make_reducer("exact", contribution(ownership[rank], 4, buckets=2), len(sidecar(0)))
    reducer.begin(make_group(path / "first", rank, 2), ownership)
    if rank:
        with pytest.raises(CorruptSegment, match="rank 0") as caught:
            reducer.reduce(sidecar(rank))
        assert caught.value.ranks == (0,)
        assert (
            caught.value.sidecars.numpy().tobytes() == np.array([sidecar(0), sidecar(1)]).tobytes()
        )
    else:
        assert bits(reducer.reduce(sidecar(rank)).gradients) == bits(expected)
    reducer.begin(make_group(path / "second", rank, 2), ownership)
    reducer.verify = False
    assert (bits(reducer.reduce(sidecar(rank)).gradients) == bits(expected)) == (rank == 0)


def test_a_segment_that_arrives_damaged_is_told_by_its_checksum(tmp_path: Path) -> None:
    """The receiving rank detects the damage; the other rank has the right sum.

    Without the check, the damaged segment would be taken for the sum.
    """
    assert ranks.results(2, reduce_damaged_segment, tmp_path, tree_sum(4)) == [None] * 2


class DamagesNews(Gloo):
    """A group that changes one word of rank 0's news after it was received."""

    word: int  # offset of the word in rank 0's tail

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        work = super().recv(tensor, rank, tag)
        return self._afterwards(work, tensor) if tag == 0 else work

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        words = len(sidecar(0)) + 3  # the flags, a doubt, the checksum
        rows = tensor[-self.size * words * 4 :].view(self.size, words, 4)
        return self._afterwards(super().all_reduce(tensor), rows[0])

    def _afterwards(self, work: Any, row: torch.Tensor) -> Any:
        word = row[self.word].reshape(-1).view(torch.int32)

        class Damaged:
            def wait(self) -> None:
                work.wait()
                word[0] ^= 1 << 30  # changes a floating-point 0, too

        return Damaged()


def reduce_damaged_news(line: Line, path: Path, kind: Any, word: int) -> None:
    rank, ownership = line.rank, [[0, 2], [1, 3]]
    group = (DamagesNews if rank else Gloo)(path / "first", rank, 2)
    if isinstance(group, DamagesNews):
        group.word = word
    reducer = make_reducer(kind, contribution(ownership[rank], 4), len(sidecar(0)))
    reducer.begin(group, ownership)
    if rank:
        with pytest.raises(CorruptSegment, match="news from rank 0") as caught:
            reducer.reduce(sidecar(rank))
        assert caught.value.ranks == (0,)
        assert caught.value.sidecars[0].view(torch.int64).tolist() == [0] * len(sidecar(0))
        assert caught.value.sidecars[1].numpy().tobytes() == np.array(sidecar(1)).tobytes()
    else:
        check_news(reducer.reduce(sidecar(rank)), 2)
    reducer.begin(Gloo(path / "second", rank, 2), ownership)
    check_news(reducer.reduce(sidecar(rank)), 2)


@pytest.mark.parametrize("word", [0, 4, -3, -2, -1])
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_news_that_arrive_damaged_are_told_by_their_checksum(
    kind: Any, word: int, tmp_path: Path
) -> None:
    """The word is a loss, a vote, a flag or the checksum itself: none of the news of that rank is
    used.
    """
    assert ranks.results(2, reduce_damaged_news, tmp_path, kind, word) == [None] * 2


class Counts(Gloo):
    """A group that counts its collectives."""

    collectives = 0

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.collectives += 1
        return super().all_reduce(tensor)


def reduce_doubtful_sum(line: Line, path: Path) -> None:
    rank = line.rank
    group = Counts(path / "store", rank, 3)
    reducer = make_reducer(
        "fast", contribution(OWNERSHIPS[4, 3][rank], 4, buckets=2), len(sidecar(0))
    )

    def attempt(damaged: bool, collectives: int) -> None:
        reducer.begin(group, OWNERSHIPS[4, 3])
        before = group.collectives
        reducer.arrived = lambda views: views[1].fill_(
            float("nan" if damaged and rank == 1 else "0")
        )
        try:
            check_news(reducer.reduce(sidecar(rank)), 3)
        finally:
            assert group.collectives == before + collectives

    if rank != 1:
        for collectives in (2, 3, 2):
            attempt(damaged=True, collectives=collectives)
    else:
        with pytest.raises(DoubtfulSum):
            attempt(damaged=True, collectives=2)
        with pytest.raises(CorruptSegment, match="rank 1") as caught:
            attempt(damaged=True, collectives=3)
        assert caught.value.ranks == (1,)
        attempt(damaged=False, collectives=2)


def test_a_sum_that_is_not_finite_on_one_rank_alone_is_asked_about(tmp_path: Path) -> None:
    """The rank with that sum leaves; then all ranks learn of it, and reach the same verdict."""
    assert ranks.results(3, reduce_doubtful_sum, tmp_path) == [None] * 3


def reduce_overflow(line: Line, path: Path, kind: Any) -> None:
    rank = line.rank
    local = LocalGradients(FlatLayout([(64,)], [torch.float32], CPU), 2)
    reducer = make_reducer(kind, local, 0)
    group = Gloo(path / "store", rank, 2)
    reducer.begin(group, [[0], [1]])
    local.add(rank, [torch.full((64,), 3e38)])
    if kind == "fast":  # this rank alone might have received it so
        with pytest.raises(DoubtfulSum):
            reducer.reduce([])
        reducer.begin(group, [[0], [1]])
    reduced = reducer.reduce([])
    assert (reduced.finite, reduced.nonfinite) == (False, ())
    local.clear()
    local.add(
        rank, [torch.full((64,), 3e38 * rank)]
    )  # finite, though a careless check would overflow
    reduced = reducer.reduce([])
    assert (reduced.finite, reduced.nonfinite) == (True, ())


@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_an_overflow_of_finite_contributions_accuses_no_rank(kind: Any, tmp_path: Path) -> None:
    """A sum that overflows is not finite although no rank has contributed a non-finite number."""
    assert ranks.results(2, reduce_overflow, tmp_path, kind) == [None] * 2


def leave_when_told(group: Gloo, path: Path) -> None:
    """Abort the group as the agent does: gloo may not notify the partner of a transfer that broke
    off.
    """
    wait_until((path / "loss noticed").exists, "a survivor that noticed the loss")
    group.abort()


def survive(
    rank: int, group: Gloo, local: LocalGradients, path: Path, kind: Any, expected: list[np.ndarray]
) -> None:
    reducer = make_reducer(kind, local, len(sidecar(0)))
    reducer.begin(group, OWNERSHIPS[4, 4])
    threading.Thread(target=leave_when_told, args=(group, path), daemon=True).start()
    with pytest.raises(RuntimeError):
        reducer.reduce(sidecar(rank))
    (path / "loss noticed").touch()
    group.abort()
    ownership = [[0, 3], [1], [2]]
    for shard in local.keep(ownership[rank]):
        local.add(shard, gradients(shard))
    with pytest.raises(RuntimeError, match="begin"):
        reducer.reduce(sidecar(rank))
    reducer.begin(Gloo(path / "second", rank, 3), ownership)
    for _ in range(2):
        reduced = reducer.reduce(sidecar(rank))
        check_news(reduced, 3)
        for result, expected_sum in zip(reduced.gradients, expected, strict=True):
            np.testing.assert_allclose(result, expected_sum, rtol=1e-4, atol=1e-2)
        assert kind == "fast" or bits(reduced.gradients) == bits(expected)
        reducer.take_abandoned()()


def lose_a_rank(
    line: Line, path: Path, kind: Any, transfers: int, expected: list[np.ndarray]
) -> None:
    rank = line.rank
    local = contribution([rank], 4, buckets=3)
    group = (Gloo if rank < 3 else DiesBeforeTransfer)(path / "first", rank, 4)
    formed = FileStore(
        str(path / "formed"), 4
    )  # a rank that dies while others connect breaks their group, not a sum
    formed.set(str(rank), "")
    formed.wait([str(other) for other in range(4)])
    if not isinstance(group, DiesBeforeTransfer):
        survive(rank, group, local, path, kind, expected)
        return
    group.transfers_left = (
        transfers  # exact: 9 first transfers, then the spread; fast: one a bucket
    )
    reducer = make_reducer(kind, local, len(sidecar(0)))
    reducer.begin(group, OWNERSHIPS[4, 4])
    reducer.reduce(sidecar(rank))


@pytest.mark.parametrize(
    ("kind", "transfers"),
    [("exact", 0), ("exact", 4), ("exact", 10), ("fast", 0), ("fast", 1), ("fast", 2)],
)
def test_survivors_of_a_kill_reduce_again(kind: Any, transfers: int, tmp_path: Path) -> None:
    """Rank 3 of 4 dies, with three buckets. The others keep their sums, and one of them adds the
    orphaned shard.
    """
    results = ranks.results(4, lose_a_rank, tmp_path, kind, transfers, tree_sum(4))
    assert results == [None, None, None, -signal.SIGKILL]


def be_cut_off_again(line: Line, path: Path) -> None:
    """Cut two reductions off; the first group is disposed of only after the second cut."""
    model = nn.Linear(64, 1, bias=False)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), None, shared=False)
    work = ShardWork(replica, RunConfig(job=resolve_job("gpt"), nodes=2))
    reducer = work.reducer
    reducer.local.add(line.rank, [torch.ones(1, 64)])
    news = torch.zeros(reducer.sidecar_size)

    def reduce_in(number: int, *, cut_off: bool = True) -> int:
        """Run one reduction in a new group, and cut a second one off; return the address of their
        buffer.
        """
        reducer.begin(Gloo(path / f"store {number}", line.rank, 2), [[0], [1]])
        address = reducer.reduce(news).gradients[0].data_ptr()
        if cut_off:
            reducer.start_bucket(0)
        return address

    first, second = reduce_in(1), reduce_in(2, cut_off=False)
    dispose_first = work.former_buffers()
    reducer.start_bucket(0)  # in the second group, which is left
    third = reduce_in(3)
    dispose_first()
    fourth, fifth = reduce_in(4), reduce_in(5, cut_off=False)
    assert fourth == first, "the buffers of the first group are free"
    assert second not in (third, fourth, fifth), "those of the second are not"
    work.former_buffers()()
    reducer.start_bucket(0)
    assert reduce_in(6, cut_off=False) in (second, third, fourth)


def test_buffers_return_to_use_when_their_own_groups_are_gone(tmp_path: Path) -> None:
    """Disposing of a group frees the buffers of reductions cut off in it and before it, but none of
    a newer group.
    """
    assert ranks.results(2, be_cut_off_again, tmp_path) == [None, None]


def start_buckets(line: Line, path: Path, expected: list[np.ndarray]) -> None:
    rank, ownership = line.rank, [[0, 1], [2, 3]]
    local = LocalGradients(layout(3), 4)
    reducer = make_reducer("exact", local, 1)
    reducer.begin(Gloo(path / "store", rank, 2), ownership)
    first, last = ownership[rank]
    local.add(first, gradients(first))
    with pytest.raises(ValueError, match="lacks"):
        reducer.start_bucket(0)
    values = gradients(last)
    for bucket in (1, 0, 2) if rank else (0, 1):
        local.add_bucket(
            last, bucket, [values[number] for number in local.layout.buckets[bucket].parameters]
        )
        reducer.start_bucket(bucket)
    for bucket in local.pending(last):
        local.add_bucket(
            last, bucket, [values[number] for number in local.layout.buckets[bucket].parameters]
        )
    assert bits(reducer.reduce([0.5]).gradients) == bits(expected)


def test_buckets_start_in_order_while_the_last_shard_arrives(tmp_path: Path) -> None:
    """A bucket can be reduced before the next one has its last contribution, in the order of the
    numbers.
    """
    assert ranks.results(2, start_buckets, tmp_path, tree_sum(4)) == [None, None]


def test_a_membership_without_exact_ownership_is_refused() -> None:
    reducer = make_reducer("exact", LocalGradients(layout(), 4), 1)
    with pytest.raises(RuntimeError, match="begin"):
        reducer.reduce([0.0])
    for ownership in ([[0, 1, 2]], [[0, 1, 2, 3, 3]], [[0, 1], [2, 3]]):
        with pytest.raises(ValueError, match=r"share out|owners"):
            reducer.begin(None, ownership)
    reducer.begin(None, [[0, 1, 2, 3]])
    with pytest.raises(ValueError, match="sidecar"):
        reducer.reduce([])


def test_results_have_the_types_of_the_parameters() -> None:
    mixed = FlatLayout([(3,), (2,)], [torch.bfloat16, torch.float64], CPU)
    local = LocalGradients(mixed, 2)
    for shard in range(2):
        local.add(
            shard,
            [torch.ones(3, dtype=torch.bfloat16), torch.full((2,), 1 / 3, dtype=torch.float64)],
        )
    reducer = make_reducer("exact", local, 0)
    reducer.begin(None, [[0, 1]])
    low, high = reducer.reduce([]).gradients
    assert (low.dtype, low.tolist(), high.dtype, high.tolist()) == (
        torch.bfloat16,
        [2.0] * 3,
        torch.float64,
        [2 / 3] * 2,
    )
