"""The reduction of some buckets of the gradient while the backward pass computes the others.

-> reduction/gradients.py: the buckets. step/trainer.py (``_join_early``): when this is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from chaoskit.runtime.group.collective import GroupFailed
from chaoskit.runtime.reduction.choice import Reducer
from chaoskit.runtime.reduction.gradients import LocalGradients


class Overlap:
    """Adds each bucket of a shard to the local gradients once the backward pass has completed it.

    In a shard that was begun with ``launch``, it also starts to reduce the bucket. The constructor
    registers hooks on ``parameters``, which act between :meth:`begin` and :meth:`end`;
    :meth:`detach` removes them.

    An error of the process group must not surface inside autograd: it is kept, and raised by
    :meth:`check`.

    Args:
        contribution: returns a numbered part of the current shard's contribution. The last parts
            are the gradients of ``parameters``. Parts before these are read in :meth:`end`.
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
            number: bucket_index
            for bucket_index, bucket in enumerate(self._buckets)
            for number in bucket.parameters
        }
        self._shard: int | None = None
        self._launch = False
        self._has_launched = False
        self._missing_counts: list[int] = []
        self._error: GroupFailed | None = None
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(parameters, first)
        ]

    def begin(self, shard: int, *, launch: bool) -> None:
        """Prepare for the backward pass of ``shard``.

        Args:
            launch: it is the last shard: reduce each bucket that it completes.
        """
        self._shard, self._launch, self._has_launched = shard, launch, False
        self._missing_counts = [len(bucket.parameters) for bucket in self._buckets]

    def end(self) -> None:
        """Add the buckets in which some parameters got no gradient, after the backward pass.

        All of the shard is then in the local gradients. Raise RuntimeError without :meth:`begin`.
        """
        shard, self._shard = self._shard, None
        if shard is None:
            raise RuntimeError("no shard was begun: call begin() first")
        for bucket in self._local.pending(shard):
            self._local.add_bucket(shard, bucket, self._gradients(bucket))

    def restart(self) -> None:
        """Drop the results of a failed backward pass. Another pass of the same shard may follow."""
        if (shard := self._shard) is not None:
            self.abandon()
            self.begin(shard, launch=False)

    def abandon(self) -> None:
        """Drop the current shard, and all shards of a sum into which it was folded.

        Ranks that were sent a part of it must leave the group, as that part belongs to no sum.
        """
        shard, self._shard = self._shard, None
        if shard is None:
            return
        self._local.discard(shard)
        if self._has_launched and self._error is None:
            self._error = GroupFailed(
                f"the gradient of shard {shard} was discarded while it was being sent"
            )

    def detach(self) -> None:
        """Remove the hooks from the parameters. The object is of no use then."""
        for handle in self._handles:
            handle.remove()

    def drop(self) -> None:
        """Forget the current shard, and any error."""
        self._shard, self._error = None, None

    def check(self) -> None:
        """Raise the error of the process group that occurred during the backward pass, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _hook(self, number: int) -> Any:
        """Return the hook that autograd calls when parameter ``number`` has its gradient."""

        def complete(parameter: Tensor) -> None:
            if self._shard is None:
                return
            bucket = self._bucket_of[number]
            self._missing_counts[bucket] -= 1
            if self._missing_counts[bucket] == 0:
                self._add(self._shard, bucket)

        return complete

    def _add(self, shard: int, bucket: int) -> None:
        """Add a complete bucket to the local gradients; in the last shard, start to reduce it."""
        self._local.add_bucket(shard, bucket, self._gradients(bucket))
        if not self._launch or self._error is not None:
            return
        self._has_launched = True
        try:
            self._reducer.start_bucket(bucket)
        except GroupFailed as error:
            self._error = error

    def _gradients(self, bucket: int) -> list[Tensor | None]:
        return [self._contribution(number) for number in self._buckets[bucket].parameters]
