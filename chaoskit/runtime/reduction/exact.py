"""The reduction that gives the same bits at every world size."""

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
    World,
)
from chaoskit.runtime.reduction.summation import OrderedSum, Probe, all_finite
from chaoskit.runtime.reduction.tree import Subtree, merge_order


class _Message(NamedTuple):
    tensor: Tensor
    peer: int
    tag: int


class _BucketPlan(NamedTuple):
    """How one bucket is shared out: rank ``r`` finishes elements ``cuts[r]`` to ``cuts[r + 1]`` of it."""

    cuts: tuple[int, ...]
    received: dict[Subtree, Tensor]  # the others' sums of this rank's segment
    receives: tuple[_Message, ...]
    spread: tuple[_Message, ...]  # the others' finished segments
    segment: Tensor  # of this rank, in the result


class ExactReducer(Reducer):
    """Sums in the canonical tree: every rank receives all partial sums of its segment, finishes it, and spreads it.

    With one subtree a rank this moves the bytes of a ring all-reduce. Segments travel whole: cutting them finer to
    overlap additions with transfers cost more in messages than it gained (gloo, loopback).
    """

    def _allocate(self) -> Buffers:
        # One subtree a rank needs less than one gradient's worth to receive into.
        tails = torch.zeros(
            self.shard_count, self._flags_at + self.shard_count + 1, dtype=torch.int64
        )
        return Buffers(self.layout.allocate(), self.layout.allocate(), tails.to(self.layout.device))

    @property
    def _posts_ahead(self) -> bool:
        """Whether receives of the second exchange are posted with the first one's.

        It saves gloo a round trip queued behind megabytes. NCCL has no tags: its first exchange would wait for them.
        """
        return self.layout.device.type == "cpu"

    @property
    def _flags_at(self) -> int:
        """A tail: the sidecar's bits, the checksum of a segment, whether it is finite, a flag for each subtree, and
        the checksum of all that."""
        return self.sidecar_size + 2

    def _plan(self, world: World) -> None:
        buffers = self._buffers
        all_cuts = [_cuts(bucket.start, bucket.stop, world.size) for bucket in self.layout.buckets]
        others = [
            contribution for contribution in world.contributions if contribution.rank != world.rank
        ]
        needed = len(others) * sum(cuts[world.rank + 1] - cuts[world.rank] for cuts in all_cuts)
        if needed > buffers.received.numel():
            buffers.received = buffers.received.new_empty(needed).fill_(0)
        subtrees = [subtree for _, subtree in world.contributions]
        self._tree = OrderedSum(subtrees, merge_order(subtrees, self.shard_count))
        self._plans: list[_BucketPlan] = []
        used = 0
        for bucket, cuts in enumerate(all_cuts):
            size = cuts[world.rank + 1] - cuts[world.rank]
            pieces = (
                buffers.received[used : used + size * len(others)].view(len(others), size).unbind()
            )
            used += size * len(others)
            self._plans.append(
                self._plan_bucket(world, bucket, cuts, dict(zip(others, pieces, strict=True)))
            )
        # A message of its own: within the segments' it would cost a copy of them.
        tails = buffers.tails
        self._tail_receives = [_Message(tails[peer], peer, 0) for peer in world.peers]
        self._tail_sends = [_Message(tails[world.rank], peer, 0) for peer in world.peers]

    def _plan_bucket(
        self, world: World, bucket: int, cuts: tuple[int, ...], pieces: dict[Contribution, Tensor]
    ) -> _BucketPlan:
        flat = self._buffers.flat
        receives = [
            _Message(pieces[contribution], peer, self._tag(bucket, contribution.subtree.lo))
            for peer in world.peers
            for contribution in world.contributions
            if contribution.rank == peer
        ]
        spread = [
            _Message(flat[cuts[peer] : cuts[peer + 1]], peer, self._tag(bucket))
            for peer in world.peers
        ]
        received = {contribution.subtree: piece for contribution, piece in pieces.items()}
        segment = flat[cuts[world.rank] : cuts[world.rank + 1]]
        return _BucketPlan(cuts, received, tuple(receives), tuple(spread), segment)

    def _tag(self, bucket: int, shard: int | None = None) -> int:
        """Of the message with a subtree's sum that starts at ``shard``, or with a finished segment."""
        return 1 + bucket * (self.shard_count + 1) + (self.shard_count if shard is None else shard)

    def _exchange(
        self,
        receives: Sequence[_Message],
        sends: Sequence[_Message],
        ahead: Sequence[_Message] = (),
    ) -> list[Work]:
        """Start the transfers; returns ``receives``, not those posted ``ahead`` for a later exchange.

        Empty segments are not sent: both sides know them.
        """
        group = self._member().group
        if group is None:
            return []
        with group.coalesce():
            works = [
                self._under_way(group.recv(*message))
                for message in receives
                if message.tensor.numel()
            ]
            for message in ahead:
                if message.tensor.numel():
                    self._under_way(group.recv(*message))
            for message in sends:
                if message.tensor.numel():
                    self._under_way(group.send(*message))
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
            for subtree in world.own
        ]
        own = {
            subtree: total[cuts[world.rank] : cuts[world.rank + 1]]
            for subtree, total in sums.items()
        }
        self._inputs.append(own | plan.received)
        # Transfers are waited for in the order of their start: what comes last of all must not be started earlier.
        is_last = bucket + 1 == len(self.layout.buckets)
        ahead = (
            (*plan.spread, *(self._tail_receives if is_last else ())) if self._posts_ahead else ()
        )
        self._receiving.append(self._exchange(plan.receives, sends, ahead))

    def _finish(self, sidecar: Tensor) -> Reduced:
        world, probe = self._member(), Probe()
        for bucket, plan in enumerate(self._plans):
            self._wait(self._receiving[bucket])
            self._tree.run(self._inputs[bucket], plan.segment, probe.see)
            sends = [_Message(plan.segment, peer, self._tag(bucket)) for peer in world.peers]
            self._exchange(() if self._posts_ahead else plan.spread, sends)
        self._buffers.tails[world.rank].copy_(self._tail(probe, sidecar))
        self._exchange(() if self._posts_ahead else self._tail_receives, self._tail_sends)
        self._wait(list(self._works.values()))
        self.arrived(self._views)
        tails = self._buffers.tails[: world.size].cpu()
        if self.verify and world.group is not None:
            self._verify(tails)
        return self._read(tails)

    def _verify(self, tails: Tensor) -> None:
        """Compare every tail and segment with its maker's checksum; this rank's own, too: others have a copy of it."""
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
        return tails[:, : self.sidecar_size].clone().view(torch.float64)

    def _tail(self, probe: Probe, sidecar: Tensor) -> Tensor:
        """What this rank tells all others. Contributions are looked at only if their sum is not finite."""
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
        size, flags_at = self.sidecar_size, self._flags_at
        flagged = tails[:, flags_at:-1].any(dim=0).tolist()
        return Reduced(
            gradients=self._gradients(),
            sidecars=self._sidecars(tails),
            finite=bool(tails[:, size + 1].all()),
            nonfinite=tuple(one for one in self._member().contributions if flagged[one.subtree.lo]),
            grad_sum=int(tails[:, size].sum()),
        )

    def _reset(self) -> None:
        super()._reset()
        self._receiving: list[list[Work]] = []
        self._inputs: list[dict[Subtree, Tensor]] = []


def _cuts(start: int, stop: int, parts: int) -> tuple[int, ...]:
    """Where ``start`` to ``stop`` is cut into aligned parts of nearly the same size; some may be empty."""
    blocks = (stop - start) // ALIGNMENT
    return tuple(start + blocks * part // parts * ALIGNMENT for part in range(parts + 1))
