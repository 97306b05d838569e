"""The samples of a shard, and its randomness: functions of (seed, step, shard), never of a rank.

-> data/positions.py: the order of the dataset. coordinator/membership/assignment.py: which rank
computes a shard. runtime/state/prefetch.py: batches that are fetched ahead.
runtime/state/batch_follows_world.py: the shards dealt so far if the batch follows the world.
"""

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

#: Calls after which code is held to draw random numbers itself, as another thread may have drawn.
DRAW_TRIALS = 3


def derive_seed(*key: int) -> int:
    """Return a 63-bit seed from integers, well mixed (BLAKE2b)."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(*key: int) -> None:
    """Seed torch, :mod:`random` and, if it is imported, NumPy's global generator.

    The seed is :func:`derive_seed` of the key.
    """
    seed = derive_seed(*key)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every backend
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class Sampler:
    """Deals a dataset into global batches, in another order each epoch.

    In an epoch, no sample is left out or repeated.

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
        self.size = size
        self.batch_size = batch_size
        self.shard_count = shard_count
        self.seed = seed
        self._positions = Positions(size, batch_size, seed)

    def samples(self, step: int, shard: int, dealt: int | None = None) -> list[int]:
        """Return the indices of the samples of one shard of one step, in order.

        Args:
            dealt: the number of shards of all steps before; None if each of them had V.
        """
        number = (step * self.shard_count if dealt is None else dealt) + shard
        size = self.batch_size // self.shard_count
        samples: list[int] = self._positions.stretch(number * size, size).tolist()
        return samples


def load(dataset: Any, samples: Sequence[int]) -> Any:
    """Return the batch of the given samples, by torch's conventions for map-style datasets.

    If the dataset returns a list, it holds samples to be collated (``Subset.__getitems__`` returns
    one). Anything else is a batch already.
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
    """Return the batch of the given samples on ``device``.

    Args:
        source: returns the batch on the device of the dataset.
    """
    return map_tensors(source(dataset, samples), lambda tensor: tensor.to(device))


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch of the same structure with ``change`` applied to each tensor.

    Anything else in it is unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(part, change) for key, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, change) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(part, change) for part in batch)
    return batch


def drawn_generators(act: Callable[[], None]) -> list[str]:
    """Call ``act``, and return the names of the generators of the process that drew meanwhile.

    Other threads of the process may have drawn.
    """
    before = _generator_states()
    act()
    after = _generator_states()
    return [name for name, state in before.items() if after[name] != state]


def _generator_states() -> dict[str, Any]:
    """Return the states of the generators that belong to the whole process, by name."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (name, keys.tobytes(), *rest)
    return states
