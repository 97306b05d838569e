"""What a reduction needs from a process group."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class GroupFailed(RuntimeError):
    """An operation of the group failed, as a rank was lost or the group was left. This rank itself is sound."""


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Return once the transfer is complete on this rank; raise GroupFailed if something ended it early.

        Called once: gloo hangs in a second wait for the same receive.
        """


class Group(Protocol):
    """The ranks of one generation. All tensors are contiguous and stay alive and unchanged until waited for.

    Transfers between two ranks with the same tag arrive in the order in which they were sent. A backend for
    accelerators may ignore tags (NCCL): there both sides issue transfers in the same order within one :meth:`coalesce`
    block.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, tensor: Tensor, dst: int, tag: int, /) -> Work: ...

    def recv(self, tensor: Tensor, src: int, tag: int, /) -> Work: ...

    def all_reduce(self, tensor: Tensor, /) -> Work:
        """Sum in place."""

    def coalesce(self) -> AbstractContextManager[object]:
        """Issue the sends and receives of the block as one batch; their works are waited for only after it."""
