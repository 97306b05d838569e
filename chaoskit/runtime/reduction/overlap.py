"""Reduces buckets of the gradient while the backward pass still computes the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from chaoskit.runtime.group.collective import GroupFailed
from chaoskit.runtime.reduction.choice import Reducer
from chaoskit.runtime.reduction.gradients import LocalGradients


class Overlap:
    """Adds each bucket of a shard to the local gradients as soon as it is complete, and starts to reduce it.

    An error of the process group must not surface inside autograd: it is kept, and raised by :meth:`check`.

    Args:
        contribution: by number, what the layout names, of the shard under way; the last ones are the gradients of
            ``parameters``. What comes before these is asked for in :meth:`end`.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        local: LocalGradients,
        reducer: Reducer,
        contribution: Callable[[int], Tensor | None],
    ) -> None:
        self._local, self._reducer, self._contribution = local, reducer, contribution
        first = len(local.layout.shapes) - len(parameters)
        self._buckets = local.layout.buckets
        self._bucket_of = {
            number: place
            for place, bucket in enumerate(self._buckets)
            for number in bucket.parameters
        }
        self._shard: int | None = None
        self._launch = False
        self._launched = False
        self._missing: list[int] = []
        self._error: GroupFailed | None = None
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(parameters, first)
        ]

    def begin(self, shard: int, *, launch: bool) -> None:
        """The next backward pass is that of ``shard``. ``launch``: it is the last one, reduce what it completes."""
        self._shard, self._launch, self._launched = shard, launch, False
        self._missing = [len(bucket.parameters) for bucket in self._buckets]

    def end(self) -> None:
        """The backward pass is over: add buckets of which some parameters got no gradient."""
        shard, self._shard = self._shard, None
        assert shard is not None
        for bucket in self._local.pending(shard):
            self._local.add_bucket(shard, bucket, self._gradients(bucket))

    def restart(self) -> None:
        """The backward pass has failed: forget what it has added. Another one of the same shard may follow."""
        if (shard := self._shard) is not None:
            self.abandon()
            self.begin(shard, launch=False)

    def abandon(self) -> None:
        """Forget the shard under way. It takes those with it into whose sum it was folded.

        Ranks that were sent a part of it already must leave the group: what they have is no part of any sum.
        """
        shard, self._shard = self._shard, None
        if shard is None:
            return
        self._local.discard(shard)
        if self._launched and self._error is None:
            self._error = GroupFailed(
                f"the gradient of shard {shard} was given up while it was under way"
            )

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def drop(self) -> None:
        """Forget a shard under way, and any error."""
        self._shard, self._error = None, None

    def check(self) -> None:
        """Raise what went wrong in the process group during the backward pass."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _hook(self, number: int) -> Any:
        def complete(parameter: Tensor) -> None:
            if self._shard is None:
                return
            bucket = self._bucket_of[number]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                self._add(bucket)

        return complete

    def _add(self, bucket: int) -> None:
        assert self._shard is not None
        self._local.add_bucket(self._shard, bucket, self._gradients(bucket))
        if not self._launch or self._error is not None:
            return
        self._launched = True
        try:
            self._reducer.start_bucket(bucket)
        except GroupFailed as error:
            self._error = error

    def _gradients(self, bucket: int) -> list[Tensor | None]:
        return [self._contribution(number) for number in self._buckets[bucket].parameters]
