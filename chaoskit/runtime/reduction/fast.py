"""The reduction by the backend's own all-reduce: as fast as it is, with bits that depend on the world."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chaoskit.runtime.reduction.checksums import row_checksums, wrong_rows
from chaoskit.runtime.reduction.reducer import (
    Buffers,
    Contribution,
    CorruptSegment,
    DoubtfulSum,
    Reduced,
    Reducer,
    World,
)
from chaoskit.runtime.reduction.summation import OrderedSum, Probe, all_finite, block_size
from chaoskit.runtime.reduction.tree import Merge, Subtree

_PARTS = 4  # 16-bit numbers to an int64
_FLAGS = 63  # to an int64, which stays positive


class FastReducer(Reducer):
    """Sums with one all-reduce a bucket.

    The last bucket has a tail with a row for each rank, zero on all other ranks. A row is of int64 words: the
    sidecar's bits, a bit for each subtree that is not finite, whether this rank left the last reduction in doubt, and
    the checksum of all that. Each word is four 16-bit numbers, which floating-point addition of zeros leaves exact.

    A result that is not finite, though no contribution is flagged, is the same on all ranks if it overflowed; if it
    was damaged on its way into one of them, that rank alone knows. So whoever finds one leaves with
    :class:`DoubtfulSum`. The next reduction tells all of them of the doubt, and all of them ask everybody what it
    found this time, by one more all-reduce of a word a rank: there is none in a step that nobody doubts.
    """

    _doubts = False

    @property
    def _row_size(self) -> int:
        return self.sidecar_size - (-self.shard_count // _FLAGS) + 2

    def _allocate(self) -> Buffers:
        tail_size = self.shard_count * (self._row_size * _PARTS + 1)
        flat = torch.empty(
            self.layout.numel + tail_size, dtype=self.layout.dtype, device=self.layout.device
        ).fill_(0)
        return Buffers(flat, flat.new_empty(0), flat.new_empty(0))

    def _plan(self, world: World) -> None:
        self._contribution = OrderedSum(world.own, _left_to_right(world.own))
        tail_size = world.size * self._row_size * _PARTS
        self._tail, self._answers, _ = self._buffers.flat[self.layout.numel :].tensor_split(
            [tail_size, tail_size + world.size]
        )

    def _launch(self, bucket: int, sums: Mapping[Subtree, Tensor]) -> None:
        start, stop, _ = self.layout.buckets[bucket]
        mine = self._buffers.flat[start:stop]
        probe = Probe()
        if sums:
            self._contribution.run(sums, mine, probe.see_values)
        else:
            mine.zero_()
        if not probe.surely_finite():
            self._flagged |= {subtree for subtree, total in sums.items() if not all_finite(total)}
        if bucket + 1 < len(self.layout.buckets):
            self._all_reduce(mine)

    def _all_reduce(self, tensor: Tensor) -> None:
        group = self._member().group
        if group is not None:
            self._under_way(group.all_reduce(tensor))

    def _finish(self, sidecar: Tensor) -> Reduced:
        self._fill_tail(sidecar)
        last = self.layout.buckets[-1]
        self._all_reduce(self._buffers.flat[last.start : self.layout.numel + len(self._tail)])
        self._wait(list(self._works.values()))
        self.arrived(self._views)
        probe = Probe()
        result = self._buffers.flat[: self.layout.numel]
        for block in result.split(block_size(result)):
            probe.see(block)
        rows = _decode(self._tail.cpu().numpy()).reshape(-1, self._row_size)
        sidecars = torch.from_numpy(rows[:, : self.sidecar_size].copy().view(np.float64))
        if self.verify and self._member().group is not None and (unread := wrong_rows(rows)):
            raise CorruptSegment(unread, sidecars, unread)
        nonfinite = self._flagged_in(rows)
        return Reduced(
            gradients=self._gradients(),
            sidecars=sidecars,
            finite=not nonfinite
            and self._agree(probe.surely_finite() or all_finite(result), rows, sidecars),
            nonfinite=nonfinite,
            grad_sum=probe.checksum(),
        )

    def _fill_tail(self, sidecar: Tensor) -> None:
        row = np.zeros(self._row_size, dtype=np.int64)
        row[: self.sidecar_size] = sidecar.numpy().view(np.int64)
        for subtree in self._flagged:
            word, bit = divmod(subtree.lo, _FLAGS)
            row[self.sidecar_size + word] |= 1 << bit
        row[-2] = self._doubts
        row[-1:] = row_checksums(row[None, :-1])
        tail = np.zeros((self._member().size, self._row_size * _PARTS), dtype=np.float32)
        tail[self._member().rank] = row.view(np.uint16)
        self._tail.copy_(torch.from_numpy(tail.reshape(-1)))

    def _flagged_in(self, rows: NDArray[np.int64]) -> tuple[Contribution, ...]:
        """The contributions that their ranks found not finite."""
        flags = rows[:, self.sidecar_size : -2]
        if not flags.any():
            return ()
        words: list[list[int]] = flags.tolist()
        return tuple(
            one
            for one in self._member().contributions
            if words[one.rank][one.subtree.lo // _FLAGS] >> one.subtree.lo % _FLAGS & 1
        )

    def _agree(self, finite: bool, rows: NDArray[np.int64], sidecars: Tensor) -> bool:
        """Whether the sum of finite contributions is finite, as all ranks find. ``finite``: this rank's copy of it.

        Raises:
            DoubtfulSum: if it is not here, and nobody expected that. CorruptSegment: if it is not here alone.
        """
        world = self._member()
        if world.group is None:
            return finite
        if not rows[:, -2].any():
            self._doubts = not finite
            if self._doubts:
                raise DoubtfulSum
            return True
        self._answers.zero_()
        self._answers[world.rank] = not finite
        self._all_reduce(self._answers)
        self._wait(list(self._works.values()))
        self._doubts = False
        if self._answers.all():
            return False
        if not finite:
            raise CorruptSegment([world.rank], sidecars)
        return True

    def _reset(self) -> None:
        super()._reset()
        self._flagged: set[Subtree] = set()


def _left_to_right(subtrees: tuple[Subtree, ...]) -> list[Merge]:
    merges: list[Merge] = []
    for subtree in subtrees[1:]:
        left = merges[-1].parent if merges else subtrees[0]
        merges.append(Merge(left, subtree, Subtree(left.lo, subtree.hi)))
    return merges


def _decode(parts: NDArray[np.floating]) -> NDArray[np.int64]:
    with np.errstate(
        invalid="ignore"
    ):  # one that arrived damaged may be no number: the checksum tells
        return parts.astype(np.uint16).view(np.int64)
