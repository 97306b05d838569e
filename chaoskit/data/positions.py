"""The indices of the samples of each step and rank, as a function of seed and step.

Nothing is replayed after a restart.

-> runtime/state/sampling.py: in a run of chaoskit, a shard takes the place of a rank.
coordinator/membership/assignment.py: which rank computes a shard.
runtime/state/batch_follows_world.py: the position of a step if the batch follows the world.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chaoskit.data.permutation import Permutation
from chaoskit.errors import BadInput
from chaoskit.typed import typed_arguments


class Positions:
    """Deals a dataset into global batches, in another order each epoch.

    In an epoch, no sample is left out or repeated.

    Batches continue over the end of an epoch. Any step costs the same, so a restart continues at
    once.

    Args:
        size: samples in the dataset.
        batch_size: samples in the global batch, over all ranks.
        seed: the seed of the orders.

    Raises:
        BadInput: if ``batch_size`` is below 1, the dataset is smaller than a batch, or an argument
            is of another type.
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
        """Return the indices of this rank's part of a step's batch.

        The array is int64, of shape (batch_size // world,).

        The parts of all ranks, one after the other, are the same batch at every world size.

        Raises:
            BadInput: if the world does not divide the batch, there is no such rank, or an argument
                is of another type.
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
        """Return the indices of ``count`` consecutive samples, as int64.

        Args:
            start: the number of samples that are dealt before, over all epochs.
            count: at most ``size``, which is not checked. The samples may reach into the next
                epoch.
        """
        epoch, place = divmod(start, self.size)
        count_in_epoch = min(count, self.size - place)
        samples = self._order_of(epoch)(np.arange(place, place + count_in_epoch))
        if count_in_epoch == count:
            return samples
        return np.concatenate(
            [samples, self._order_of(epoch + 1)(np.arange(count - count_in_epoch))]
        )

    def _order_of(self, epoch: int) -> Permutation:
        """Return the order of an epoch. The last one is cached."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self.size, self.seed, epoch)
        return self._order
