"""The gradients of one step on this rank: laid out flat, and folded in tree order.

-> reduction/tree.py: the order. reduction/reducer.py sums them over the ranks.
coordinator/membership/assignment.py: which shards a rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.runtime.reduction.tree import Subtree, folds

#: Parameters and segments start at multiples of this, for SIMD and for checksums of 8-byte words.
ALIGNMENT = 16


class Bucket(NamedTuple):
    """A contiguous part of the flat gradient.

    It has the elements ``start`` to ``stop``, which are whole ``parameters`` (by number).
    """

    start: int
    stop: int
    parameters: tuple[int, ...]


class FlatLayout:
    """The position of each parameter in a flat gradient.

    Parameters lie in reverse registration order, the order in which a backward pass finishes them,
    so that bucket 0 is complete first. The layout does not depend on the number of buckets; gaps
    are zero.

    Args:
        shapes, dtypes: of the parameters, in registration order.
        device: of all of them.
        buckets: desired number of parts of about the same size; there are never more than
            parameters.

    Attributes:
        starts: the start of each parameter, in registration order.

    Raises:
        ValueError: without parameters, or if one is not of a real floating-point type.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        buckets: int = 1,
    ) -> None:
        if not shapes or not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError("a reduction needs parameters, all of a real floating-point type")
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self.device = device
        self.dtype = torch.float64 if torch.float64 in self.dtypes else torch.float32
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.starts = [0] * len(self._sizes)
        self.numel = 0
        for number in reversed(range(len(self._sizes))):
            self.starts[number] = self.numel
            self.numel += -(-self._sizes[number] // ALIGNMENT) * ALIGNMENT
        self.buckets = self._cut(buckets)

    @classmethod
    def of(cls, parameters: Iterable[Tensor], buckets: int = 1) -> FlatLayout:
        """Return the layout for the gradients of ``parameters``.

        Raise ValueError if they are on several devices.
        """
        tensors = list(parameters)
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"parameters are on {len(devices)} devices, not on one")
        return cls(
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            devices.pop(),
            buckets,
        )

    def _cut(self, count: int) -> tuple[Bucket, ...]:
        """Return at most ``count`` buckets of about the same size."""
        buckets: list[Bucket] = []
        members: list[int] = []
        start = 0
        ends = [self.numel, *self.starts]  # in reverse order: the next parameter is the one before
        for number in reversed(range(len(self._sizes))):
            members.append(number)
            stop, next_stop = ends[number], ends[max(number - 1, 0)]
            is_nearest_cut = (stop + next_stop) * count >= 2 * self.numel * (len(buckets) + 1)
            if not number or (is_nearest_cut and len(buckets) + 1 < count):
                buckets.append(Bucket(start, stop, tuple(members)))
                start, members = stop, []
        return tuple(buckets)

    def allocate(self) -> Tensor:
        """Return a flat gradient of zeros whose pages exist already.

        The first touch of a page takes ten times as long as a copy.
        """
        return torch.empty(self.numel, dtype=self.dtype, device=self.device).fill_(0)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one view into ``flat`` for each parameter, in registration order."""
        places = zip(self.starts, self._sizes, self.shapes, strict=True)
        return [flat[start : start + size].view(shape) for start, size, shape in places]


@dataclass
class _Sum:
    """A flat buffer and its views."""

    flat: Tensor
    views: list[Tensor]


@dataclass
class _Incoming:
    """A shard of which some buckets may be missing.

    Attributes:
        node: the node of the tree that the shard completes.
        joins: True if the shard is added to sums, False if it is a sum of its own.
        operands: the sums into which it is folded; the last one remains.
        added: the buckets that were added.
    """

    shard: int
    node: Subtree
    joins: bool
    operands: list[_Sum]
    added: set[int] = field(default_factory=set)


class LocalGradients:
    """The contribution of this rank to one step: its gradients, summed as far as possible.

    No reduction changes it. After a failed reduction it is reduced again, in another world and
    perhaps with more shards. Transfers that an abort left behind may still read it: abort the old
    group before adding shards.

    Args:
        layout: the layout of the gradients.
        shard_count: V, the number of shards over all ranks.
        buffers: the number of flat gradients to allocate at first. With one shard a rank, one is in
            use. A second one saves time when a survivor takes over a shard. More are allocated when
            needed, and kept.
    """

    def __init__(self, layout: FlatLayout, shard_count: int, buffers: int = 2) -> None:
        self.layout = layout
        self.shard_count = shard_count
        self._sums: dict[Subtree, _Sum] = {}
        self._incoming: _Incoming | None = None
        self._free_sums = [self._allocate() for _ in range(buffers)]

    def _allocate(self) -> _Sum:
        """Return a new flat gradient of zeros with its views."""
        flat = self.layout.allocate()
        return _Sum(flat, self.layout.views(flat))

    def has(self, shard: int) -> bool:
        """Return whether ``shard`` is in the sum completely."""
        return any(shard in node.shards for node in self._sums)

    def shards(self) -> tuple[int, ...]:
        """Return all shards that are in the sum completely, ascending."""
        return tuple(shard for node in sorted(self._sums) for shard in node.shards)

    def pending(self, shard: int) -> tuple[int, ...]:
        """Return the buckets of ``shard`` that were not added yet."""
        if self.has(shard):
            return ()
        added = self._incoming.added if self._incoming and self._incoming.shard == shard else set()
        return tuple(bucket for bucket in range(len(self.layout.buckets)) if bucket not in added)

    def sums(self, bucket: int) -> dict[Subtree, Tensor]:
        """Return this bucket's part of every partial sum that contains it. Read only."""
        start, stop, _ = self.layout.buckets[bucket]
        parts = {node: held.flat[start:stop] for node, held in self._sums.items()}
        if self._incoming and bucket in self._incoming.added:
            parts[self._incoming.node] = self._incoming.operands[-1].flat[start:stop]
        return parts

    def add(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one shard's gradients, one for each parameter; ``None`` means zeros.

        Raises:
            ValueError: if the shard is in the sum or does not exist, another is incomplete, or a
                shape is wrong.
        """
        if len(gradients) != len(self.layout.shapes):
            raise ValueError(f"{len(gradients)} gradients for {len(self.layout.shapes)} parameters")
        for bucket, (_, _, parameters) in enumerate(self.layout.buckets):
            self.add_bucket(shard, bucket, [gradients[number] for number in parameters])

    @torch.no_grad()
    def add_bucket(self, shard: int, bucket: int, gradients: Sequence[Tensor | None]) -> None:
        """Add one bucket of one shard, in the order of the bucket's ``parameters``.

        It may be called during the backward pass. The shard is in the sum once all its buckets are.
        Until then no other shard can be added, and the sum into which it is folded counts as
        incomplete as well.

        Raises:
            ValueError: as :meth:`add`, and if the bucket was added before.
        """
        self._check(bucket, gradients)
        if self._incoming is None:
            self._incoming = self._open(shard)
        incoming = self._incoming
        if incoming.shard != shard or bucket in incoming.added:
            raise ValueError(
                f"shard {incoming.shard} is incomplete, or has bucket {bucket} of shard {shard} already"
            )
        self._fold(incoming, self.layout.buckets[bucket], gradients)
        incoming.added.add(bucket)
        if len(incoming.added) == len(self.layout.buckets):
            *spent, total = incoming.operands
            self._free_sums += spent
            self._sums[incoming.node] = total
            self._incoming = None

    def _open(self, shard: int) -> _Incoming:
        """Begin a shard, and return it with the sums into which it is folded.

        These are no sums of this rank until the shard is complete.

        Raises:
            ValueError: if the shard is in the sum already, or does not exist.
        """
        merges = folds(self._sums, shard, self.shard_count)
        if not merges:
            new_sum = self._free_sums.pop() if self._free_sums else self._allocate()
            return _Incoming(shard, Subtree(shard, shard + 1), False, [new_sum])
        # folding is in place: the siblings are no sums any more from the first bucket on
        siblings = [
            node for merge in merges for node in (merge.left, merge.right) if node in self._sums
        ]
        return _Incoming(
            shard, merges[-1].parent, True, [self._sums.pop(node) for node in siblings]
        )

    def _check(self, bucket: int, gradients: Sequence[Tensor | None]) -> None:
        """Raise ValueError if the gradients do not fit the parameters of a bucket."""
        shapes = [self.layout.shapes[number] for number in self.layout.buckets[bucket].parameters]
        if len(gradients) != len(shapes):
            raise ValueError(
                f"{len(gradients)} gradients for the {len(shapes)} parameters of bucket {bucket}"
            )
        for gradient, shape in zip(gradients, shapes, strict=True):
            if gradient is not None and gradient.shape != shape:
                raise ValueError(
                    f"a gradient of shape {tuple(gradient.shape)} for a parameter of shape {shape}"
                )

    def _fold(
        self, incoming: _Incoming, bucket: Bucket, gradients: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of a bucket to the sums that the shard completes, in tree order."""
        leaf, *above = incoming.operands
        places = [leaf.views[number] for number in bucket.parameters]
        pairs = [
            (place, gradient)
            for place, gradient in zip(places, gradients, strict=True)
            if gradient is not None
        ]
        targets, values = [place for place, _ in pairs], [gradient for _, gradient in pairs]
        missing_targets = [
            place for place, gradient in zip(places, gradients, strict=True) if gradient is None
        ]
        if targets and incoming.joins:
            torch._foreach_add_(targets, values)  # addition commutes: saves a buffer and a copy
        elif targets:
            torch._foreach_copy_(targets, values)
        if missing_targets and incoming.joins:
            torch._foreach_add_(
                missing_targets, 0.0
            )  # -0.0 becomes 0.0, like with zeros of another rank
        elif missing_targets:
            torch._foreach_zero_(missing_targets)
        partial = leaf
        for operand in above:
            operand.flat[bucket.start : bucket.stop].add_(partial.flat[bucket.start : bucket.stop])
            partial = operand

    def discard(self, shard: int) -> tuple[int, ...]:
        """Take ``shard`` out of the sum. A folded sum cannot be unfolded, so all of it is dropped.

        Returns:
            The other shards that are dropped. They must be computed again if they are still needed.
        """
        node = next((node for node in self._sums if shard in node.shards), None)
        if node is not None:
            self._free_sums.append(self._sums.pop(node))
        elif self._incoming and shard in self._incoming.node.shards:
            node = self._incoming.node
            self._free_sums += self._incoming.operands
            self._incoming = None
        return tuple(other for other in node.shards if other != shard) if node else ()

    def keep(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Discard all shards but these, and an incomplete shard.

        Called when the next membership is entered.

        Returns:
            Those of ``shards`` that are not in the sum and must be computed.
        """
        kept = set(shards)
        if self._incoming:
            self.discard(self._incoming.shard)
        for shard in set(self.shards()) - kept:
            self.discard(shard)
        return tuple(sorted(kept - set(self.shards())))

    def clear(self) -> None:
        """Drop all sums, for the next step. Buffers are kept for reuse."""
        self._free_sums += self._sums.values()
        self._sums.clear()
        if self._incoming:
            self._free_sums += self._incoming.operands
            self._incoming = None
