"""The reduction by the backend's own all-reduce: fast, with bits that depend on the world.

-> reduction/reducer.py: buffers, buckets and failed reductions. step/inquiry.py: a doubtful sum.
"""

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
    ReducerWorld,
)
from chaoskit.runtime.reduction.summation import GradientProbe, OrderedSum, all_finite, block_size
from chaoskit.runtime.reduction.tree import Merge, Subtree

_PARTS = 4  # 16-bit numbers per int64
_FLAGS = 63  # per int64, which stays positive


class FastReducer(Reducer):
    """Sums with one all-reduce a bucket.

    The last bucket has a tail with a row for each rank, zero on all other ranks. A row consists of
    int64 words: the sidecar's bits, a bit for each subtree that is not finite, whether this rank
    left the last reduction in doubt, and a checksum. Each word is four 16-bit numbers, which stay
    exact when zeros are added.

    A result may be not finite although no contribution is flagged. It is the same on all ranks if
    it overflowed. If it was damaged on its way to one rank, only that rank has it. A rank with such
    a result raises :class:`DoubtfulSum`. The next reduction shows the doubt to all ranks. They then
    exchange their new results by one more all-reduce of a word per rank. There is no such
    all-reduce in a step without a doubt.
    """

    _is_in_doubt = False

    @property
    def _row_size(self) -> int:
        """The number of int64 words in a row of the tail."""
        return self.sidecar_size - (-self.shard_count // _FLAGS) + 2

    def _allocate(self) -> Buffers:
        tail_size = self.shard_count * (self._row_size * _PARTS + 1)
        flat = torch.empty(
            self.layout.numel + tail_size, dtype=self.layout.dtype, device=self.layout.device
        ).fill_(0)
        return Buffers(flat, flat.new_empty(0), flat.new_empty(0))

    def _plan(self, world: ReducerWorld) -> None:
        self._contribution = OrderedSum(world.own_subtrees, _left_to_right(world.own_subtrees))
        tail_size = world.size * self._row_size * _PARTS
        self._tail, self._answers, _ = self._buffers.flat[self.layout.numel :].tensor_split(
            [tail_size, tail_size + world.size]
        )

    def _launch(self, bucket: int, sums: Mapping[Subtree, Tensor]) -> None:
        start, stop, _ = self.layout.buckets[bucket]
        target = self._buffers.flat[start:stop]
        probe = GradientProbe()
        if sums:
            self._contribution.run(sums, target, probe.see_values)
        else:
            target.zero_()
        if not probe.surely_finite():
            self._flagged |= {subtree for subtree, total in sums.items() if not all_finite(total)}
        if bucket + 1 < len(self.layout.buckets):
            self._all_reduce(target)

    def _all_reduce(self, tensor: Tensor) -> None:
        """Start to sum ``tensor`` over all ranks, in place; do nothing in a world of one."""
        group = self._member().group
        if group is not None:
            self._track(group.all_reduce(tensor))

    def _finish(self, sidecar: Tensor) -> Reduced:
        self._fill_tail(sidecar)
        last = self.layout.buckets[-1]
        self._all_reduce(self._buffers.flat[last.start : self.layout.numel + len(self._tail)])
        self._wait(list(self._works.values()))
        self.arrived(self._views)
        probe = GradientProbe()
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
        """Write this rank's row into the tail, and zeros into all others."""
        row = np.zeros(self._row_size, dtype=np.int64)
        row[: self.sidecar_size] = sidecar.numpy().view(np.int64)
        for subtree in self._flagged:
            word, bit = divmod(subtree.lo, _FLAGS)
            row[self.sidecar_size + word] |= 1 << bit
        row[-2] = self._is_in_doubt
        row[-1:] = row_checksums(row[None, :-1])
        tail = np.zeros((self._member().size, self._row_size * _PARTS), dtype=np.float32)
        tail[self._member().rank] = row.view(np.uint16)
        self._tail.copy_(torch.from_numpy(tail.reshape(-1)))

    def _flagged_in(self, rows: NDArray[np.int64]) -> tuple[Contribution, ...]:
        """Return the contributions that their ranks marked as not finite."""
        flags = rows[:, self.sidecar_size : -2]
        if not flags.any():
            return ()
        words: list[list[int]] = flags.tolist()
        return tuple(
            contribution
            for contribution in self._member().contributions
            if words[contribution.rank][contribution.subtree.lo // _FLAGS]
            >> contribution.subtree.lo % _FLAGS
            & 1
        )

    def _agree(self, finite: bool, rows: NDArray[np.int64], sidecars: Tensor) -> bool:
        """Return whether the sum of finite contributions is finite, which all ranks decide alike.

        If a rank was left in doubt by the last reduction, all ranks exchange one more word each.

        Args:
            finite: whether it is finite on this rank.

        Raises:
            DoubtfulSum: if it is not finite here, and no rank was in doubt before.
            CorruptSegment: if it is not finite on this rank only.
        """
        world = self._member()
        if world.group is None:
            return finite
        if not rows[:, -2].any():
            self._is_in_doubt = not finite
            if self._is_in_doubt:
                raise DoubtfulSum
            return True
        self._answers.zero_()
        self._answers[world.rank] = not finite
        self._all_reduce(self._answers)
        self._wait(list(self._works.values()))
        self._is_in_doubt = False
        if self._answers.all():
            return False
        if not finite:
            raise CorruptSegment([world.rank], sidecars)
        return True

    def _reset(self) -> None:
        super()._reset()
        self._flagged: set[Subtree] = set()


def _left_to_right(subtrees: tuple[Subtree, ...]) -> list[Merge]:
    """Return the additions of a running sum; its nodes are not those of the canonical tree."""
    merges: list[Merge] = []
    for subtree in subtrees[1:]:
        left = merges[-1].parent if merges else subtrees[0]
        merges.append(Merge(left, subtree, Subtree(left.lo, subtree.hi)))
    return merges


def _decode(parts: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the int64 words that 16-bit numbers in a float array make up, four a word."""
    with np.errstate(invalid="ignore"):  # a damaged number may be NaN: the checksum shows it
        return parts.astype(np.uint16).view(np.int64)
