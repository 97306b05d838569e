"""The reduction that gives the same bits at every world size.

-> reduction/tree.py: the order of the additions. reduction/gradients.py: the sums of one rank.
group/process_group.py: the transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chaoskit.runtime.group.collective import Work
from chaoskit.runtime.reduction.checksums import row_checksums, wrong_rows
from chaoskit.runtime.reduction.gradients import ALIGNMENT
from chaoskit.runtime.reduction.reducer import (
    Buffers,
    Contribution,
    CorruptSegment,
    Reduced,
    Reducer,
    ReducerWorld,
)
from chaoskit.runtime.reduction.summation import GradientProbe, OrderedSum, all_finite
from chaoskit.runtime.reduction.tree import Subtree, merge_order


class _Message(NamedTuple):
    """A transfer of ``tensor`` from or to rank ``peer``."""

    tensor: Tensor
    peer: int
    tag: int


class _BucketPlan(NamedTuple):
    """The partition of one bucket.

    Rank ``r`` finishes the elements ``cuts[r]`` to ``cuts[r + 1]``.
    """

    cuts: tuple[int, ...]
    received: dict[Subtree, Tensor]  # the others' sums of this rank's segment
    receives: tuple[_Message, ...]
    segment_receives: tuple[_Message, ...]  # the others' finished segments
    segment: Tensor  # of this rank, in the result


class ExactReducer(Reducer):
    """Sums in the canonical tree.

    Every rank receives all partial sums of its segment, adds them, and sends the result to all
    others.

    With one subtree a rank this moves the bytes of a ring all-reduce. Segments are sent whole:
    cutting them finer, to overlap additions with transfers, took more time for messages than it
    saved (gloo, loopback).
    """

    def _allocate(self) -> Buffers:
        # with one subtree a rank, less than one gradient is received
        tails = torch.zeros(
            self.shard_count, self._flags_at + self.shard_count + 1, dtype=torch.int64
        )
        return Buffers(self.layout.allocate(), self.layout.allocate(), tails.to(self.layout.device))

    @property
    def _posts_early(self) -> bool:
        """True if receives of the second exchange are posted with those of the first one.

        It saves gloo a round trip queued behind megabytes. NCCL has no tags: its first exchange
        would wait for them.
        """
        return self.layout.device.type == "cpu"

    @property
    def _flags_at(self) -> int:
        """The place of the flags in a tail.

        A tail consists of the sidecar's bits, the checksum of a segment, whether it is finite, a
        flag for each subtree, and a checksum.
        """
        return self.sidecar_size + 2

    def _plan(self, world: ReducerWorld) -> None:
        buffers = self._buffers
        all_cuts = [_cuts(bucket.start, bucket.stop, world.size) for bucket in self.layout.buckets]
        others = [
            contribution for contribution in world.contributions if contribution.rank != world.rank
        ]
        needed_elements = len(others) * sum(
            cuts[world.rank + 1] - cuts[world.rank] for cuts in all_cuts
        )
        if needed_elements > buffers.received.numel():
            buffers.received = buffers.received.new_empty(needed_elements).fill_(0)
        subtrees = [subtree for _, subtree in world.contributions]
        self._tree = OrderedSum(subtrees, merge_order(subtrees, self.shard_count))
        self._plans: list[_BucketPlan] = []
        used_elements = 0
        for bucket, cuts in enumerate(all_cuts):
            size = cuts[world.rank + 1] - cuts[world.rank]
            pieces = (
                buffers.received[used_elements : used_elements + size * len(others)]
                .view(len(others), size)
                .unbind()
            )
            used_elements += size * len(others)
            self._plans.append(
                self._plan_bucket(world, bucket, cuts, dict(zip(others, pieces, strict=True)))
            )
        # a separate message: adding it to those of the segments would need a copy of them
        tails = buffers.tails
        self._tail_receives = [_Message(tails[peer], peer, 0) for peer in world.peers]
        self._tail_sends = [_Message(tails[world.rank], peer, 0) for peer in world.peers]

    def _plan_bucket(
        self,
        world: ReducerWorld,
        bucket: int,
        cuts: tuple[int, ...],
        pieces: dict[Contribution, Tensor],
    ) -> _BucketPlan:
        """Return the transfers of one bucket.

        Args:
            cuts: the borders of the segments.
            pieces: the memory for each contribution of another rank to this rank's segment.
        """
        flat = self._buffers.flat
        receives = [
            _Message(pieces[contribution], peer, self._tag(bucket, contribution.subtree.lo))
            for peer in world.peers
            for contribution in world.contributions
            if contribution.rank == peer
        ]
        segment_receives = [
            _Message(flat[cuts[peer] : cuts[peer + 1]], peer, self._tag(bucket))
            for peer in world.peers
        ]
        received = {contribution.subtree: piece for contribution, piece in pieces.items()}
        segment = flat[cuts[world.rank] : cuts[world.rank + 1]]
        return _BucketPlan(cuts, received, tuple(receives), tuple(segment_receives), segment)

    def _tag(self, bucket: int, shard: int | None = None) -> int:
        """Return the tag of the message with a subtree's sum that starts at ``shard``.

        Without ``shard`` it is the tag of a finished segment.
        """
        return 1 + bucket * (self.shard_count + 1) + (self.shard_count if shard is None else shard)

    def _exchange(
        self,
        receives: Sequence[_Message],
        sends: Sequence[_Message],
        early_receives: Sequence[_Message] = (),
    ) -> list[Work]:
        """Start all transfers, and return those of ``receives``.

        Empty segments are not sent: both sides know them.

        Args:
            early_receives: receives of a later exchange, which are started now.
        """
        group = self._member().group
        if group is None:
            return []
        with group.coalesce():
            works = [
                self._track(group.recv(*message)) for message in receives if message.tensor.numel()
            ]
            for message in early_receives:
                if message.tensor.numel():
                    self._track(group.recv(*message))
            for message in sends:
                if message.tensor.numel():
                    self._track(group.send(*message))
        return works

    def _launch(self, bucket: int, sums: Mapping[Subtree, Tensor]) -> None:
        world, plan = self._member(), self._plans[bucket]
        start = self.layout.buckets[bucket].start
        cuts = [cut - start for cut in plan.cuts]
        sends = [
            _Message(
                sums[subtree][cuts[peer] : cuts[peer + 1]], peer, self._tag(bucket, subtree.lo)
            )
            for peer in world.peers
            for subtree in world.own_subtrees
        ]
        own_parts = {
            subtree: total[cuts[world.rank] : cuts[world.rank + 1]]
            for subtree, total in sums.items()
        }
        self._inputs.append(own_parts | plan.received)
        # transfers are waited for in the order of their start: start the last one last
        is_last = bucket + 1 == len(self.layout.buckets)
        early_receives = (
            (*plan.segment_receives, *(self._tail_receives if is_last else ()))
            if self._posts_early
            else ()
        )
        self._receiving.append(self._exchange(plan.receives, sends, early_receives))

    def _finish(self, sidecar: Tensor) -> Reduced:
        world, probe = self._member(), GradientProbe()
        for bucket, plan in enumerate(self._plans):
            self._wait(self._receiving[bucket])
            self._tree.run(self._inputs[bucket], plan.segment, probe.see)
            sends = [_Message(plan.segment, peer, self._tag(bucket)) for peer in world.peers]
            self._exchange(() if self._posts_early else plan.segment_receives, sends)
        self._buffers.tails[world.rank].copy_(self._tail(probe, sidecar))
        self._exchange(() if self._posts_early else self._tail_receives, self._tail_sends)
        self._wait(list(self._works.values()))
        self.arrived(self._views)
        tails = self._buffers.tails[: world.size].cpu()
        if self.verify and world.group is not None:
            self._verify(tails)
        return self._read(tails)

    def _verify(self, tails: Tensor) -> None:
        """Raise CorruptSegment if a tail or a segment differs from its sender's checksum.

        This rank's own is compared as well: other ranks have a copy of it.
        """
        unread = wrong_rows(tails.numpy())
        words = [
            torch.stack(
                [
                    self._buffers.flat[plan.cuts[rank] : plan.cuts[rank + 1]]
                    .view(torch.int64)
                    .sum()
                    for plan in self._plans
                ]
            ).sum()
            for rank in range(len(tails))
        ]
        wrong = (
            (torch.stack(words).cpu() != tails[:, self.sidecar_size]).nonzero().flatten().tolist()
        )
        if wrong or unread:
            raise CorruptSegment(sorted({*wrong, *unread}), self._sidecars(tails), unread)

    def _sidecars(self, tails: Tensor) -> Tensor:
        """Return the sidecars of all ranks as float64, one row a rank."""
        return tails[:, : self.sidecar_size].clone().view(torch.float64)

    def _tail(self, probe: GradientProbe, sidecar: Tensor) -> Tensor:
        """Return this rank's tail. Contributions are tested only if their sum is not finite."""
        finite = probe.surely_finite() or all(all_finite(plan.segment) for plan in self._plans)
        size, flags_at = self.sidecar_size, self._flags_at
        tail = np.zeros(flags_at + self.shard_count + 1, dtype=np.int64)
        tail[:size] = sidecar.numpy().view(np.int64)
        tail[size], tail[size + 1] = probe.checksum(), finite
        if not finite:
            for inputs in self._inputs:
                for subtree, piece in inputs.items():
                    tail[flags_at + subtree.lo] |= not all_finite(piece)
        tail[-1:] = row_checksums(tail[None, :-1])
        return torch.from_numpy(tail)

    def _read(self, tails: Tensor) -> Reduced:
        """Return the result of the reduction, given the tails of all ranks."""
        size, flags_at = self.sidecar_size, self._flags_at
        flagged = tails[:, flags_at:-1].any(dim=0).tolist()
        return Reduced(
            gradients=self._gradients(),
            sidecars=self._sidecars(tails),
            finite=bool(tails[:, size + 1].all()),
            nonfinite=tuple(
                part for part in self._member().contributions if flagged[part.subtree.lo]
            ),
            grad_sum=int(tails[:, size].sum()),
        )

    def _reset(self) -> None:
        super()._reset()
        self._receiving: list[list[Work]] = []
        self._inputs: list[dict[Subtree, Tensor]] = []


def _cuts(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """Return where ``start`` to ``stop`` is cut into aligned parts of about the same size.

    Some parts may be empty.
    """
    blocks = (stop - start) // ALIGNMENT
    return tuple(start + blocks * part // parts * ALIGNMENT for part in range(parts + 1))
