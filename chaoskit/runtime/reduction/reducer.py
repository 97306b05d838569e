"""The base of both reductions: memberships, buckets in progress, and lasting buffers.

-> reduction/exact.py and reduction/fast.py: the transfers. step/trainer.py (``_attempt``): what
follows from each error. group/process_group.py: how a rank leaves a transfer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.runtime.group.collective import CollectiveGroup, Work
from chaoskit.runtime.reduction.gradients import LocalGradients
from chaoskit.runtime.reduction.tree import Subtree, maximal_subtrees


class Contribution(NamedTuple):
    """A sum of shards that one rank brought into the reduction."""

    rank: int
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a reduction, the same on every rank.

    Attributes:
        gradients: the sums over all shards, one a parameter, in its dtype. They may be changed
            (clipped, scaled), and are valid until a bucket of the next reduction is started.
        sidecars: the sidecar of each rank, a row of float64 on the CPU.
        finite: if False, the gradients are useless.
        nonfinite: the contributions that are to blame. If it is empty and the result is not finite,
            finite contributions overflowed when they were added.
        grad_sum: int64 checksum of the gradients' bits; only meaningful if ``finite``.
    """

    gradients: list[Tensor]
    sidecars: Tensor
    finite: bool
    nonfinite: tuple[Contribution, ...]
    grad_sum: int

    @property
    def guilty(self) -> dict[int, tuple[int, ...]]:
        """The ranks with contributions that are not finite, and the shards in these.

        Empty after an overflow.
        """
        shards: dict[int, tuple[int, ...]] = {}
        for rank, subtree in self.nonfinite:
            shards[rank] = shards.get(rank, ()) + tuple(subtree.shards)
        return shards


class CorruptSegment(RuntimeError):
    """A part of the result, or a rank's sidecar, differs from the data that was sent.

    The contribution is kept.

    Attributes:
        unread: ranks of which the sidecars arrived damaged.
        ranks: the ranks that sent the wrong parts; this rank itself, if its own part changed after
            it was sent.
        sidecars: of all ranks, as in :class:`Reduced`; zeros, which mean nothing, for those that
            arrived damaged.
        what: ``gradient``, or ``news`` if no part of the result is wrong.
    """

    def __init__(self, ranks: Sequence[int], sidecars: Tensor, unread: Sequence[int] = ()) -> None:
        self.ranks, self.unread, self.sidecars = tuple(ranks), tuple(unread), sidecars.clone()
        self.sidecars[list(unread)] = 0
        self.what = "news" if set(ranks) <= set(unread) else "gradient"
        super().__init__(
            f"corrupt: the {self.what} from rank {', '.join(map(str, ranks))} differs from its checksum"
        )


class DoubtfulSum(RuntimeError):
    """The result is not finite here, though every contribution is. The contribution is kept.

    Either the sum overflowed on every rank, or it was damaged on this rank only. The next reduction
    decides which.
    """

    def __init__(self) -> None:
        super().__init__(
            "doubtful: the reduced gradient is not finite here, though every contribution is"
        )


class ReducerWorld(NamedTuple):
    """A membership, as a reducer uses it: its group, and the sums that each rank contributes."""

    group: CollectiveGroup | None
    rank: int
    size: int
    contributions: tuple[Contribution, ...]  # ascending by shard

    @property
    def own_subtrees(self) -> tuple[Subtree, ...]:
        return tuple(subtree for rank, subtree in self.contributions if rank == self.rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks.

        Each rank starts with its successor, so that they do not all send to the same rank first.
        """
        return tuple((self.rank + distance) % self.size for distance in range(1, self.size))


@dataclass
class Buffers:
    """The memory that transfers write into.

    Attributes:
        flat: the result. The others may be empty.
    """

    flat: Tensor
    received: Tensor
    tails: Tensor


class Reducer(ABC):
    """Reduces ``local``, step after step, in one membership after the other.

    Any exception in a reduction leaves the local gradients intact. The reduction is then repeated
    after :meth:`begin` with a new group. A backend's thread may still write into the buffers of
    transfers that were cut off. These buffers are set aside (:meth:`take_abandoned`), and on a CPU
    a second set is ready. Memory of an accelerator is scarce, and its aborts end all transfers:
    there, release the buffers first.

    Args:
        local: this rank's contributions.
        sidecar_size: the number of float64 values that each rank sends to all others.

    Attributes:
        verify: compare received data with the checksums of the senders, where these are known.
        arrived: called with the result, one tensor a parameter in the type of the sums, before it
            is read.
    """

    def __init__(self, local: LocalGradients, sidecar_size: int) -> None:
        self.local = local
        self.layout = layout = local.layout
        self.shard_count = local.shard_count
        self.sidecar_size = sidecar_size
        self.verify = True
        self.arrived: Callable[[list[Tensor]], None] = lambda views: None
        self._spare_buffers = [
            self._allocate() for _ in range(2 if layout.device.type == "cpu" else 1)
        ]
        self._abandoned: list[tuple[Buffers, dict[int, Work]]] = []
        self._casts = [
            None if dtype == layout.dtype else torch.zeros(shape, dtype=dtype, device=layout.device)
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]
        self._world: ReducerWorld | None = None
        self._works: dict[int, Work] = {}  # transfers not waited for, by identity
        self._ready_buckets: set[int] = set()
        self._launched_count = 0
        self._adopt(self._spare_buffers.pop())

    def begin(self, group: CollectiveGroup | None, ownership: Sequence[Iterable[int]]) -> None:
        """Enter a membership, and drop a reduction in progress.

        Args:
            group: its ranks; ``None`` for a world of one.
            ownership: the shards of each rank, by rank. Every shard has one owner.

        Raises:
            ValueError: if shards are missing or have two owners, or the group is of another size.
        """
        owned = [sorted(shards) for shards in ownership]
        if sorted(itertools.chain(*owned)) != list(range(self.shard_count)):
            raise ValueError(f"{owned} do not share out {self.shard_count} shards")
        if len(owned) != (group.size if group else 1):
            raise ValueError(f"{len(owned)} owners for a group of {group.size if group else 1}")
        self._drop()
        contributions = [
            Contribution(rank, subtree)
            for rank, shards in enumerate(owned)
            for subtree in maximal_subtrees(shards, self.shard_count)
        ]
        contributions.sort(key=lambda contribution: contribution.subtree)
        self._world = ReducerWorld(
            group, group.rank if group else 0, len(owned), tuple(contributions)
        )
        self._plan(self._world)

    def start_bucket(self, bucket: int) -> None:
        """Start the transfers of ``bucket``, which the local gradients have for every own shard.

        They start in the order of the buckets on every rank, independent of the order in which they
        become ready.

        Raises:
            RuntimeError: without a membership.
            GroupFailed: if a rank is lost, or the group was left.
            ValueError: if one of this rank's shards is missing, or the bucket was started before.
        """
        if bucket in self._ready_buckets:
            raise ValueError(f"bucket {bucket} was started before")
        self._own_sums(bucket)
        self._ready_buckets.add(bucket)
        try:
            while self._launched_count in self._ready_buckets:
                self._launch(self._launched_count, self._own_sums(self._launched_count))
                self._launched_count += 1
        except BaseException:
            self._drop()
            raise

    def reduce(self, sidecar: Tensor | Sequence[float]) -> Reduced:
        """Start the buckets that are not in progress, wait for all, and return the result.

        Raises:
            RuntimeError: without a membership.
            GroupFailed: if a rank is lost.
            CorruptSegment: if a part of the result arrived damaged here; others may have received
                it well.
            DoubtfulSum: if a part may have arrived damaged.
            ValueError: if one of this rank's shards is missing, or the sidecar has another length.
        """
        if len(sidecar) != self.sidecar_size:
            raise ValueError(f"a sidecar of {len(sidecar)} values, not {self.sidecar_size}")
        for bucket in range(len(self.layout.buckets)):
            if bucket not in self._ready_buckets:
                self.start_bucket(bucket)
        try:
            reduced = self._finish(torch.as_tensor(sidecar, dtype=torch.float64))
        except BaseException:
            self._drop()
            raise
        self._reset()
        return reduced

    def take_abandoned(self) -> Callable[[], None]:
        """Return a function that releases the buffers of all reductions cut off so far.

        Call it once their groups are gone; any thread may do so. It leaves the buffers of
        reductions that are cut off after this call, as those have newer groups.
        """
        abandoned, self._abandoned = self._abandoned, []

        def release() -> None:
            while abandoned:
                buffers, _ = abandoned.pop()
                self._spare_buffers.append(buffers)

        return release

    def _drop(self) -> None:
        """Leave the membership, and set aside buffers that its transfers may still touch."""
        if self._works:
            self._abandoned.append((self._buffers, self._works))
            self._adopt(self._spare_buffers.pop() if self._spare_buffers else self._allocate())
        self._world = None
        self._reset()

    def _reset(self) -> None:
        """Forget the buckets in progress and their transfers."""
        self._works = {}
        self._ready_buckets.clear()
        self._launched_count = 0

    def _adopt(self, buffers: Buffers) -> None:
        """Use these buffers from now on."""
        self._buffers = buffers
        self._views = self.layout.views(buffers.flat[: self.layout.numel])

    def _member(self) -> ReducerWorld:
        """Return the current membership. Raise RuntimeError without one."""
        if self._world is None:
            raise RuntimeError("the reducer is in no membership: call begin() first")
        return self._world

    def _own_sums(self, bucket: int) -> dict[Subtree, Tensor]:
        """Return the partial sums of a bucket that this rank contributes.

        Shards that it computed for an earlier membership are left out.

        Raises:
            ValueError: if a shard is missing.
        """
        own_subtrees, sums = self._member().own_subtrees, self.local.sums(bucket)
        if missing := [subtree for subtree in own_subtrees if subtree not in sums]:
            raise ValueError(
                f"bucket {bucket} lacks the sums of {missing}, it holds those of {sorted(sums)}"
            )
        return {subtree: sums[subtree] for subtree in own_subtrees}

    def _track(self, work: Work) -> Work:
        """Note a transfer that was started, and return it."""
        self._works[id(work)] = work
        return work

    def _wait(self, works: Iterable[Work]) -> None:
        """Wait for noted transfers. Raise GroupFailed if one ends early."""
        for work in works:
            work.wait()
            del self._works[id(work)]

    def _gradients(self) -> list[Tensor]:
        """Return the reduced gradients in the parameters' own types, in registration order."""
        pairs = [
            (cast, view)
            for cast, view in zip(self._casts, self._views, strict=True)
            if cast is not None
        ]
        if pairs:
            torch._foreach_copy_([cast for cast, _ in pairs], [view for _, view in pairs])
        return [
            view if cast is None else cast
            for cast, view in zip(self._casts, self._views, strict=True)
        ]

    @abstractmethod
    def _allocate(self) -> Buffers:
        """Return a new set of buffers for the layout."""

    @abstractmethod
    def _plan(self, world: ReducerWorld) -> None:
        """Prepare the transfers and buffers for a membership."""

    @abstractmethod
    def _launch(self, bucket: int, sums: Mapping[Subtree, Tensor]) -> None:
        """Start the first transfers of a bucket.

        Args:
            sums: this rank's partial sums of the bucket.
        """

    @abstractmethod
    def _finish(self, sidecar: Tensor) -> Reduced:
        """Complete all buckets, and return the result.

        Raises:
            GroupFailed, CorruptSegment, DoubtfulSum: as :meth:`reduce`.
        """
