"""Jobs that fetch batches ahead of the shard that needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

LIMIT_S = 30.0
ROWS = torch.arange(384, dtype=torch.float32).view(96, 4).sin()

Source = Callable[[Sequence[int]], Tensor]


class Batches:
    """A dataset that counts the batches that were begun.

    Args:
        source: returns the batch of some samples.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._begun, self._changed = source, 0, threading.Condition()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitems__(self, indices: list[int]) -> Tensor:
        with self._changed:
            self._begun += 1
            self._changed.notify_all()
        return self._source(indices)

    def await_begun(self, count: int) -> None:
        """Wait until ``count`` batches were begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= count, LIMIT_S), (
                "the next batch is not fetched"
            )


def _rows(indices: Sequence[int]) -> Tensor:
    return ROWS[list(indices)]


def _train(
    trainer: Any, model: nn.Module, steps: int, source: Source, *, prefetch: bool, waits: bool
) -> None:
    """Train; with ``waits``, wait within each shard until the batch of the next one is being
    fetched.
    """
    trainer.register(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), clip_norm=0.5
    )
    data, bodies = Batches(source), 0
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=24, prefetch=prefetch):
                bodies += 1
                if (
                    waits and bodies > 1
                ):  # the first may be a rehearsal, which announces no next batch
                    data.await_begun(bodies + 1)
                step.backward(model(shard.batch).square().mean())


def _model(trainer: Any) -> nn.Module:
    torch.manual_seed(trainer.seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))


def replicas(trainer: Any, *, steps: int, prefetch: bool, waits: bool = False) -> None:
    """Train a model with dropout, which uses the global generators while the next batch is fetched."""
    _train(trainer, _model(trainer), steps, _rows, prefetch=prefetch, waits=waits)


def pieces(trainer: Any, *, steps: int, prefetch: bool, waits: bool = False) -> None:
    """Train the same model, sharded."""
    mesh, model = trainer.mesh(), _model(trainer)
    fully_shard(model, mesh=mesh)
    _train(trainer, model, steps, _rows, prefetch=prefetch, waits=waits)


def unreadable(trainer: Any, *, steps: int, first: int) -> None:
    """Train on data that cannot be read from sample ``first`` on."""

    def read(indices: Sequence[int]) -> Tensor:
        for index in indices:
            if index >= first:
                raise OSError(f"sample {index} cannot be read")
        return _rows(indices)

    _train(trainer, _model(trainer), steps, read, prefetch=True, waits=False)


def drawing(trainer: Any, *, steps: int) -> None:
    """Train on samples that are augmented with numbers from the generator of dropout."""
    _train(
        trainer,
        _model(trainer),
        steps,
        lambda indices: _rows(indices) + torch.rand(4),
        prefetch=True,
        waits=False,
    )
