"""Which samples a shard holds, and its randomness: functions of (seed, step, shard), never of a rank."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from chaoskit.data.positions import Positions
from chaoskit.errors import BadInput


def derive_seed(*key: int) -> int:
    """A 63-bit seed from integers, well mixed (BLAKE2b)."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(*key: int) -> None:
    """Seed torch, :mod:`random` and, where it is in use, NumPy's global generator."""
    seed = derive_seed(*key)
    torch.default_generator.manual_seed(
        seed
    )  # torch.manual_seed would ask every other backend, too
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class Sampler:
    """Deals a dataset into global batches: another order each epoch, no sample left out, none repeated.

    Args:
        size: samples in the dataset.
        batch_size: samples in the global batch.
        shard_count: V; must divide ``batch_size``.

    Raises:
        BadInput: if the batch does not fit the dataset or cannot be cut into V equal shards.
    """

    def __init__(self, size: int, batch_size: int, shard_count: int, seed: int) -> None:
        if size < batch_size:
            raise BadInput(
                "dataset",
                size,
                f"use a dataset of at least one global batch, batch_size={batch_size}",
            )
        if batch_size < 1 or batch_size % shard_count:
            raise BadInput(
                "batch_size", batch_size, f"use a multiple of the number of shards, {shard_count}"
            )
        self.size, self.batch_size, self.shard_count, self.seed = (
            size,
            batch_size,
            shard_count,
            seed,
        )
        self._positions = Positions(size, batch_size, seed)

    def samples(self, step: int, shard: int, dealt: int | None = None) -> list[int]:
        """Indices of the samples of one shard of one step, in order.

        Args:
            dealt: shards of all steps before; None where each of them had V.
        """
        number = (step * self.shard_count if dealt is None else dealt) + shard
        size = self.batch_size // self.shard_count
        samples: list[int] = self._positions.stretch(number * size, size).tolist()
        return samples


def load(dataset: Any, samples: Sequence[int]) -> Any:
    """The batch of the given samples, by torch's conventions for map-style datasets, where the dataset has them.

    A list is samples, to be collated (``Subset.__getitems__`` gives one); anything else is a batch already.
    """
    if hasattr(dataset, "__getitems__"):
        batch = dataset.__getitems__(list(samples))
    else:
        batch = [dataset[index] for index in samples]
    return default_collate(batch) if isinstance(batch, list) else batch


def fetch(
    dataset: Any,
    samples: Sequence[int],
    device: torch.device,
    source: Callable[[Any, Sequence[int]], Any] = load,
) -> Any:
    """The batch of the given samples on ``device``. ``source``: gives it where the dataset has it."""
    return map_tensors(source(dataset, samples), lambda tensor: tensor.to(device))


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same structure, each of its tensors changed; anything else in it stays."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, change) for value in batch)
    return batch
