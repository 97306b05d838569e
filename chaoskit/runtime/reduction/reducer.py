"""What all reductions share: memberships, buckets under way, and buffers that outlive an abort."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.runtime.group.collective import Group, Work
from chaoskit.runtime.reduction.gradients import LocalGradients
from chaoskit.runtime.reduction.tree import Subtree, maximal_subtrees


class Contribution(NamedTuple):
    """A sum of shards that one rank brought into the reduction."""

    rank: int
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class Reduced:
    """The outcome of a reduction, the same on every rank.

    ``gradients`` are the sums over all shards, one a parameter, in its dtype; they may be changed (clipped, scaled)
    and are valid until a bucket of the next reduction is started. If not ``finite`` they are useless: either
    ``nonfinite`` names who is to blame, or it is empty and finite contributions overflowed when they were added.
    """

    gradients: list[Tensor]
    sidecars: Tensor  # float64, on the CPU, one row a rank
    finite: bool
    nonfinite: tuple[Contribution, ...]
    grad_sum: (
        int  # int64 checksum of the gradients' bits, whatever the world; only meaningful if finite
    )

    @property
    def guilty(self) -> dict[int, tuple[int, ...]]:
        """The ranks whose contributions are not finite, with the shards in these. Empty after an overflow."""
        shards: dict[int, tuple[int, ...]] = {}
        for rank, subtree in self.nonfinite:
            shards[rank] = shards.get(rank, ()) + tuple(subtree.shards)
        return shards


class CorruptSegment(RuntimeError):
    """A part of the result, or somebody's news, is not what its maker sent. The contribution is kept.

    Attributes:
        unread: ranks whose sidecars arrived damaged.
        ranks: who made those parts; this rank itself, if its own changed after it was sent.
        sidecars: of all ranks, as in :class:`Reduced`; zeros, which say nothing, where they arrived damaged.
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

    Either the sum overflowed, and every rank finds so, or it was damaged here, and nobody else knows of it. Which of
    the two it is, the next reduction tells.
    """

    def __init__(self) -> None:
        super().__init__(
            "doubtful: the reduced gradient is not finite here, though every contribution is"
        )


class World(NamedTuple):
    """One membership as a reducer sees it."""

    group: Group | None
    rank: int
    size: int
    contributions: tuple[Contribution, ...]  # ascending by shard

    @property
    def own(self) -> tuple[Subtree, ...]:
        return tuple(subtree for rank, subtree in self.contributions if rank == self.rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, each rank starting with its successor, so that not all send to the same one first."""
        return tuple((self.rank + distance) % self.size for distance in range(1, self.size))


@dataclass
class Buffers:
    """What transfers write into. ``flat``: the result. The others may be empty."""

    flat: Tensor
    received: Tensor
    tails: Tensor


class Reducer(ABC):
    """Reduces ``local``, step after step, in one membership after the other.

    An exception out of a reduction, whatever it is, leaves the local gradients intact; the reduction is then repeated
    after :meth:`begin` with a new group. A backend's thread may still write into the buffers of transfers that were
    cut off, so these are set aside (:meth:`take_abandoned`), and on a CPU a second set is ready (memory of an
    accelerator is scarce, and its aborts end all transfers: there, release first).

    Args:
        local: this rank's contributions.
        sidecar_size: float64 values that each rank tells all others.

    Attributes:
        verify: compare what was received with the checksums of those who sent it, where they are known.
        arrived: is shown the result, one tensor a parameter in the type of the sums, before anything reads it.
    """

    def __init__(self, local: LocalGradients, sidecar_size: int) -> None:
        self.local = local
        self.layout = layout = local.layout
        self.shard_count = local.shard_count
        self.sidecar_size = sidecar_size
        self.verify = True
        self.arrived: Callable[[list[Tensor]], None] = lambda views: None
        self._spare = [self._allocate() for _ in range(2 if layout.device.type == "cpu" else 1)]
        self._abandoned: list[tuple[Buffers, dict[int, Work]]] = []
        self._casts = [
            None if dtype == layout.dtype else torch.zeros(shape, dtype=dtype, device=layout.device)
            for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]
        self._world: World | None = None
        self._works: dict[int, Work] = {}  # by id, those not waited for
        self._ready: set[int] = set()
        self._launched = 0
        self._adopt(self._spare.pop())

    def begin(self, group: Group | None, ownership: Sequence[Iterable[int]]) -> None:
        """Enter a membership, which drops a reduction under way.

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
        found = [
            Contribution(rank, subtree)
            for rank, shards in enumerate(owned)
            for subtree in maximal_subtrees(shards, self.shard_count)
        ]
        found.sort(key=lambda contribution: contribution.subtree)
        self._world = World(group, group.rank if group else 0, len(owned), tuple(found))
        self._plan(self._world)

    def start_bucket(self, bucket: int) -> None:
        """Say that ``bucket`` of every own shard is in the local gradients: its transfers may start now.

        They start in the order of the buckets on every rank, whatever the order in which they become ready.

        Raises:
            RuntimeError: without a membership. ValueError: if one of this rank's shards is missing, or twice.
        """
        if bucket in self._ready:
            raise ValueError(f"bucket {bucket} was started before")
        self._own_sums(bucket)
        self._ready.add(bucket)
        try:
            while self._launched in self._ready:
                self._launch(self._launched, self._own_sums(self._launched))
                self._launched += 1
        except BaseException:
            self._drop()
            raise

    def reduce(self, sidecar: Tensor | Sequence[float]) -> Reduced:
        """Start the buckets that are not under way, and wait for all.

        Raises:
            RuntimeError: without a membership. GroupFailed: if a rank is lost. CorruptSegment: if a part of the result
                arrived damaged here; others may have received it well. DoubtfulSum: if it may have. ValueError: if one
                of this rank's shards is missing, or the sidecar has another length.
        """
        if len(sidecar) != self.sidecar_size:
            raise ValueError(f"a sidecar of {len(sidecar)} values, not {self.sidecar_size}")
        for bucket in range(len(self.layout.buckets)):
            if bucket not in self._ready:
                self.start_bucket(bucket)
        try:
            reduced = self._finish(torch.as_tensor(sidecar, dtype=torch.float64))
        except BaseException:
            self._drop()
            raise
        self._reset()
        return reduced

    def take_abandoned(self) -> Callable[[], None]:
        """The release of the buffers of all reductions cut off so far, to be called once their groups are gone.

        Any thread may call it. Reductions that are cut off before it does have newer groups: it leaves their buffers.
        """
        abandoned, self._abandoned = self._abandoned, []

        def release() -> None:
            while abandoned:
                buffers, _ = abandoned.pop()
                self._spare.append(buffers)

        return release

    def _drop(self) -> None:
        """Leave the membership; keep what its transfers may still touch out of further use."""
        if self._works:
            self._abandoned.append((self._buffers, self._works))
            self._adopt(self._spare.pop() if self._spare else self._allocate())
        self._world = None
        self._reset()

    def _reset(self) -> None:
        self._works = {}
        self._ready.clear()
        self._launched = 0

    def _adopt(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._views = self.layout.views(buffers.flat[: self.layout.numel])

    def _member(self) -> World:
        if self._world is None:
            raise RuntimeError("the reducer is in no membership: call begin() first")
        return self._world

    def _own_sums(self, bucket: int) -> dict[Subtree, Tensor]:
        """This rank's contribution. Shards that it computed for an earlier membership are left out."""
        own, sums = self._member().own, self.local.sums(bucket)
        if missing := [subtree for subtree in own if subtree not in sums]:
            raise ValueError(
                f"bucket {bucket} lacks the sums of {missing}, it holds those of {sorted(sums)}"
            )
        return {subtree: sums[subtree] for subtree in own}

    def _under_way(self, work: Work) -> Work:
        self._works[id(work)] = work
        return work

    def _wait(self, works: Iterable[Work]) -> None:
        for work in works:
            work.wait()
            del self._works[id(work)]

    def _gradients(self) -> list[Tensor]:
        """The result in the parameters' own types."""
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
    def _allocate(self) -> Buffers: ...

    @abstractmethod
    def _plan(self, world: World) -> None:
        """Prepare for a membership."""

    @abstractmethod
    def _launch(self, bucket: int, sums: Mapping[Subtree, Tensor]) -> None:
        """Start the first transfers of a bucket."""

    @abstractmethod
    def _finish(self, sidecar: Tensor) -> Reduced:
        """Complete all buckets."""
