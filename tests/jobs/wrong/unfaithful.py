"""Jobs that break a promise on purpose, to show that the checks notice."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.arange(256, dtype=torch.float32).view(64, 4)


def _train(trainer: Any, steps: int, noise: Any, until: dict[str, Any] | None = None) -> None:
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(DATA, batch_size=8):
                step.backward(model(shard.batch / 256).square().mean() + noise())


def faithful(trainer: Any, *, steps: int, until: dict[str, Any] | None = None) -> None:
    """Train faithfully.

    Args:
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    _train(trainer, steps, lambda: 0.0, until)


def remembers_its_process(trainer: Any, *, steps: int) -> None:
    """Train with a loss that depends on the process: a replacement does not give the same numbers."""
    _train(trainer, steps, lambda: (os.getpid() % 97) * 1e-3)


def fails_everywhere(trainer: Any, *, steps: int) -> None:
    """Fail at step 5 on every rank."""

    def noise() -> float:
        if trainer.step == 5:
            raise ZeroDivisionError("five is not a good number")
        return 0.0

    _train(trainer, steps, noise)


def never_ends(trainer: Any, *, steps: int) -> None:
    """Train for ever, regardless of ``steps``."""
    _train(trainer, 10**9, lambda: 0.0)


def no_loss(trainer: Any, *, steps: int) -> None:
    """Enter transactions without computing a loss."""
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction():
            pass


def long_batch(trainer: Any, *, steps: int) -> None:
    """Ask for more samples per batch than the dataset has."""
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=128):
                step.backward(model(shard.batch).mean())


def loses_two(trainer: Any, *, steps: int, step_s: float = 0.02) -> None:
    """Train; survive any single loss, and go wrong if two ranks are lost within one step."""
    last = {
        "step": -1,
        "world": 0,
        "before": 0,
    }  # ``before``: world in which the last step was computed

    def noise() -> float:
        if last["step"] != trainer.step:
            last.update(step=trainer.step, before=last["world"])
            time.sleep(step_s)
        last["world"] = trainer.world
        return 1.0 if last["before"] - trainer.world >= 2 else 0.0

    _train(trainer, steps, noise)
