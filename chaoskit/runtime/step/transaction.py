"""The ``with`` block around one step."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from chaoskit.errors import BadInput
from chaoskit.runtime.step.shardwork import Shard


class Attempts(Protocol):
    """What a trainer does in a transaction."""

    @property
    def step(self) -> int: ...
    def _obey_halt(self) -> None: ...
    def _begin(self) -> None: ...
    def _take_step(self, dataset: Any, batch_size: int, prefetch: bool) -> Iterator[Shard]: ...
    def _backward(self, loss: Tensor) -> None: ...
    def _finish(self) -> None: ...
    def _interrupt(self) -> None: ...


class Transaction:
    """One step; made by ``trainer.transaction()``. Code after the block runs once a committed step."""

    def __init__(self, trainer: Attempts) -> None:
        self._trainer = trainer

    @property
    def number(self) -> int:
        """Number of the step, from 0. In a process that is new it is 0 until the loop over the shards has begun."""
        return self._trainer.step

    def shards(self, dataset: Any, *, batch_size: int, prefetch: bool = False) -> Iterator[Shard]:
        """This rank's shards of the step's global batch; behind the last one the step is committed.

        After a fault the loop goes on with what has to be computed again, so its body may run more than once for a
        shard. In a process that is new it begins with a rehearsal of one shard, which leaves no trace.

        Args:
            dataset: map-style: ``len(dataset)`` and ``dataset[i]``, or ``__getitems__(indices)`` for whole batches.
            batch_size: samples in the *global* batch, a multiple of the number of shards. It stays the same at every
                world size.
            prefetch: fetch the next shard, also that of the next step, on a thread while this one is computed. Then
                ``dataset[i]`` must be a function of ``i``, with no numbers from the generators that the model draws
                from, and what the script itself does with the dataset may happen at the same time.

        Raises:
            BadInput: if the dataset is shorter than one batch, or draws from those generators in the rehearsal.
        """
        if isinstance(dataset, DataLoader):
            raise BadInput(
                "dataset",
                "DataLoader",
                "pass the dataset itself: batches are drawn and put together here",
            )
        return self._trainer._take_step(dataset, batch_size, prefetch)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of one shard. ``loss``: a scalar, the mean over the shard's samples."""
        self._trainer._backward(loss)

    def __enter__(self) -> Transaction:
        self._trainer._obey_halt()
        self._trainer._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._trainer._finish()
        elif issubclass(kind, Exception):
            self._trainer._interrupt()
