"""The transaction of one training step, as a context manager.

-> step/trainer.py (replicated jobs) and step/sharded_trainer.py: the step itself, and its commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from chaoskit.errors import BadInput
from chaoskit.runtime.step.shardwork import Shard


class Attempts(Protocol):
    """The trainer, as a transaction uses it. Its methods are called in this order."""

    @property
    def step(self) -> int: ...
    def _obey_halt(self) -> None: ...
    def _begin(self) -> None: ...
    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]: ...
    def _backward(self, loss: Tensor) -> None: ...
    def _finish(self) -> None: ...
    def _interrupt(self) -> None: ...


class Transaction:
    """A step, made by ``trainer.transaction()``.

    Code after the block runs once per committed step. Leaving the block before the loop over the
    shards has ended raises BadInput, unless an exception leaves it, which goes on to the caller.
    """

    def __init__(self, trainer: Attempts) -> None:
        self._trainer = trainer

    @property
    def number(self) -> int:
        """The number of the step, from 0.

        In a new process it is 0 until the rehearsal of one shard is over.
        """
        return self._trainer.step

    def shards(self, dataset: Any, *, batch_size: int, prefetch: bool = False) -> Iterator[Shard]:
        """Yield this rank's shards of the step's global batch.

        After the last one the step is committed or, by policy ``skip``, skipped.

        After a fault the loop continues with the shards that must be computed again, so its body
        may run more than once for a shard. In a new process it begins with a rehearsal of one
        shard, which leaves no trace. Nothing is yielded if the loop has ended before in this block,
        or if a later state was taken over on entering it.

        Args:
            dataset: map-style: ``len(dataset)`` and ``dataset[i]``, or ``__getitems__(indices)``
                for whole batches.
            batch_size: samples in the *global* batch, a multiple of the number of shards. It stays
                the same at every world size.
            prefetch: fetch the next shard on a thread while this shard is computed, across steps as
                well. ``dataset[i]`` must then be a function of ``i``, without numbers from the
                generators that the model draws from. The script's own uses of the dataset may run
                at the same time.

        Raises:
            BadInput: for a DataLoader, or a dataset that is shorter than one batch or draws from
                those generators in the rehearsal; for a batch that cannot be cut into equal shards.
                Also if a loop body computes no loss, or writes into a parameter.
            NonFiniteBatch: if a batch is not finite on any rank, and the policy does not skip it.
            JobFailed: if the numbers of ranks differ, and no vote decides which of them are wrong.
        """
        if isinstance(dataset, DataLoader):
            raise BadInput(
                "dataset",
                "DataLoader",
                "pass the dataset itself: the trainer samples and collates the batches",
            )
        return self._trainer._take_step(dataset, batch_size, prefetch)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss``, and add it and its gradients to those of the shard.

        Args:
            loss: a scalar, the mean over the shard's samples.

        Raises:
            BadInput: for a second pass of the same shard in a replicated job with ``buckets`` above
                1.
        """
        self._trainer._backward(loss)

    def __enter__(self) -> Transaction:
        self._trainer._obey_halt()
        self._trainer._begin()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is None:
            self._trainer._finish()
        elif issubclass(error_type, Exception):
            self._trainer._interrupt()
