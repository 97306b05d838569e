"""Which samples belong to which step and rank: a function of seed and step. Nothing is replayed after a restart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chaoskit.data.permutation import Permutation
from chaoskit.errors import BadInput
from chaoskit.typed import typed_arguments


class Positions:
    """Deals a dataset into global batches: another order each epoch, no sample left out, none repeated.

    Batches go on over the end of an epoch. Any step costs the same, so a restart begins where it stopped, at once.

    Args:
        size: samples in the dataset.
        batch_size: samples in the global batch, over all ranks.
        seed: of the orders.

    Raises:
        BadInput: if the dataset is smaller than a batch.
    """

    @typed_arguments
    def __init__(self, size: int, batch_size: int, seed: int = 0) -> None:
        if batch_size < 1:
            raise BadInput("batch_size", batch_size, "use 1 or more")
        if size < batch_size:
            raise BadInput(
                "dataset",
                size,
                f"use a dataset of at least one global batch, batch_size={batch_size}",
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self._epoch, self._order = -1, Permutation(size, seed, -1)

    @typed_arguments
    def batch(self, step: int, rank: int = 0, world: int = 1) -> NDArray[np.int64]:
        """Indices of this rank's part of a step's batch, int64 of shape (batch_size // world,).

        The parts of all ranks, one after the other, are the same batch whatever the world is.

        Raises:
            BadInput: if the world does not divide the batch, or there is no such rank.
        """
        if world < 1 or self.batch_size % world:
            raise BadInput(
                "batch_size", self.batch_size, f"use a multiple of the number of ranks, {world}"
            )
        if not 0 <= rank < world:
            raise BadInput("rank", rank, f"use 0 to {world - 1}")
        part = self.batch_size // world
        return self.stretch(step * self.batch_size + rank * part, part)

    def stretch(self, start: int, count: int) -> NDArray[np.int64]:
        """Indices of ``count`` samples, at most one epoch, from the ``start``-th on of all that are ever dealt."""
        epoch, place = divmod(start, self.size)
        here = min(count, self.size - place)
        samples = self._of(epoch)(np.arange(place, place + here))
        if here == count:
            return samples
        return np.concatenate([samples, self._of(epoch + 1)(np.arange(count - here))])

    def _of(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self.size, self.seed, epoch)
        return self._order
