"""Jobs that write to the disk of their node in every step: one handles errors, one ends with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DATA = torch.arange(256, dtype=torch.float32).view(64, 4) / 256
SIZE_BYTES = 64 * 1024


def _save(trainer: Any) -> None:
    """Write a file as checkpoints are written: beside the old file, synced, then renamed into its
    place.
    """
    fresh = trainer.disk / f"state-{os.getpid()}.fresh"  # a spare has no rank yet
    with fresh.open("wb") as file:
        file.write(bytes(SIZE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(trainer.disk / f"state-{trainer.rank}")


def _train(trainer: Any, steps: int, save: Callable[[Any], None]) -> None:
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    while trainer.step < steps:
        save(trainer)
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=8):
                step.backward(model(shard.batch).square().mean())


def bears_errors(trainer: Any, *, steps: int) -> None:
    """Train on without the copy that could not be written."""

    def save(trainer: Any) -> None:
        try:
            _save(trainer)
        except OSError as error:
            print(f"step {trainer.step} is not saved: {error}", flush=True)

    _train(trainer, steps, save)


def ends_with_errors(trainer: Any, *, steps: int) -> None:
    """End the rank with the error if it cannot save."""
    _train(trainer, steps, _save)
