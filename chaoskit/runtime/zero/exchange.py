"""The two transfers of a ZeRO step: a rank's part of the summed gradient comes in, its part of the weights goes out.

Gradients are summed in the canonical tree over shards (:mod:`chaoskit.runtime.tree`), so the sum has the same bits at
every world size. Together both transfers move the bytes of one ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from chaoskit.runtime.gradients import LocalGradients
from chaoskit.runtime.summation import OrderedSum
from chaoskit.runtime.tree import Subtree, maximal_subtrees, merge_order


class _Message(NamedTuple):
    tensor: Tensor
    peer: int
    tag: int


class Exchange:
    """Transfers of one rank in one world.

    Args:
        group: its ranks.
        cuts: where each rank's part of all parameters begins, and where the last one ends.
    """

    def __init__(self, group: dist.ProcessGroup, cuts: Sequence[int]) -> None:
        self._group, self._cuts = group, cuts
        self.rank, self.size = group.rank(), group.size()
        self._received = torch.empty(0)
        self._nodes: tuple[Subtree, ...] = ()
        self._tree = OrderedSum((), ())

    @property
    def mine(self) -> slice:
        """This rank's part."""
        return slice(self._cuts[self.rank], self._cuts[self.rank + 1])

    @property
    def _peers(self) -> list[int]:
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def sum(self, local: LocalGradients, owners: Sequence[Sequence[int]], out: Tensor) -> None:
        """Write the sum of all shards' gradients to ``out``, as long as this rank's part.

        Args:
            local: with the shards of this rank.
            owners: by rank, the shards that it computed.

        Raises:
            RuntimeError: from the backend, if a rank is lost.
        """
        nodes = {rank: maximal_subtrees(shards, local.shard_count) for rank, shards in enumerate(owners)}
        others = [(node, peer) for peer in self._peers for node in nodes[peer]]
        own = {node: total for node, total in local.sums(0).items() if node in nodes[self.rank]}
        pieces = self._room(len(others), out)
        receives = [_Message(piece, peer, node.lo) for piece, (node, peer) in zip(pieces, others, strict=True)]
        sends = [
            _Message(total[self._cuts[peer] : self._cuts[peer + 1]], peer, node.lo)
            for peer in self._peers
            for node, total in sorted(own.items())
        ]
        self._transfer(receives, sends)
        inputs = {node: total[self.mine] for node, total in own.items()}
        inputs |= {node: piece for piece, (node, _) in zip(pieces, others, strict=True)}
        nodes_now = tuple(sorted(inputs))
        if nodes_now != self._nodes:  # as a rule each step has the same
            self._nodes, self._tree = nodes_now, OrderedSum(nodes_now, merge_order(nodes_now, local.shard_count))
        self._tree.run(inputs, out, lambda block: None)

    def spread(self, flat: Tensor) -> None:
        """Give every rank's part of ``flat`` to all others.

        Raises:
            RuntimeError: from the backend, if a rank is lost.
        """
        receives = [_Message(flat[self._cuts[peer] : self._cuts[peer + 1]], peer, 0) for peer in self._peers]
        self._transfer(receives, [_Message(flat[self.mine], peer, 0) for peer in self._peers])

    def add_up(self, tensor: Tensor) -> None:
        """All-reduce a small tensor in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)

    def begin_maximum(self, tensor: Tensor) -> Callable[[], object]:
        """Begin to take the maximum of a small tensor over all ranks, in place. What is returned waits for it."""
        if self.size == 1:
            return lambda: None
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        wait: Callable[[], object] = work.wait
        return wait

    def _room(self, count: int, like: Tensor) -> Sequence[Tensor]:
        """Where others' sums are received: memory that is used again."""
        size = like.numel()
        if self._received.numel() < count * size:
            self._received = like.new_zeros(count * size)  # touched now, and not by the transfer
        return self._received[: count * size].view(count, size).unbind()

    def _transfer(self, receives: Sequence[_Message], sends: Sequence[_Message]) -> None:
        messages = [(dist.irecv, one) for one in receives] + [(dist.isend, one) for one in sends]
        operations = [
            dist.P2POp(act, one.tensor, group=self._group, tag=one.tag, group_peer=one.peer)
            for act, one in messages
            if one.tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
