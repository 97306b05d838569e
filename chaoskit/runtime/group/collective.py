"""The interface of a process group that a reduction needs.

-> group/process_group.py: the group over gloo or NCCL.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class GroupFailed(RuntimeError):
    """An operation of the group failed: a rank was lost or the group was left.

    This rank is sound.
    """


class Work(Protocol):
    """A transfer in progress."""

    def wait(self) -> object:
        """Return once the transfer is complete on this rank.

        Call it once: gloo hangs in a second wait for the same receive.

        Raises:
            GroupFailed: if the transfer ended early.
        """


class CollectiveGroup(Protocol):
    """The ranks of one generation.

    All tensors are contiguous, and unchanged until they were waited for. Starting a transfer, and
    waiting for it, raises GroupFailed if a rank is lost or the group was left.

    Transfers between two ranks with the same tag arrive in the order in which they were sent. A
    backend for accelerators may ignore tags (NCCL). Both sides then issue transfers in the same
    order within one :meth:`coalesce` block.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, dst: int, tag: int, /) -> Work:
        """Start to send ``tensor`` to rank ``dst``, and return the transfer."""

    def recv(self, tensor: Tensor, src: int, tag: int, /) -> Work:
        """Start to receive into ``tensor`` from rank ``src``, and return the transfer."""

    def all_reduce(self, tensor: Tensor, /) -> Work:
        """Start to sum ``tensor`` over all ranks, in place, and return the transfer."""

    def coalesce(self) -> AbstractContextManager[object]:
        """Return a context that issues the sends and receives of the block as one batch.

        Wait for them only after the block. Its end may raise GroupFailed.
        """
