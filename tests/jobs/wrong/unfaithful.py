"""Jobs that break a promise on purpose, so that the checks can be seen to catch them."""

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
    """Keeps every promise. ``until``: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`."""
    _train(trainer, steps, lambda: 0.0, until)


def remembers_its_process(trainer: Any, *, steps: int) -> None:
    """Loss depends on the process that computes it: a replacement does not give the same numbers."""
    _train(trainer, steps, lambda: (os.getpid() % 97) * 1e-3)


def fails_everywhere(trainer: Any, *, steps: int) -> None:
    """Fails at step 5 on every rank."""

    def noise() -> float:
        if trainer.step == 5:
            raise ZeroDivisionError("five is not a good number")
        return 0.0

    _train(trainer, steps, noise)


def never_ends(trainer: Any, *, steps: int) -> None:
    """Ignores ``steps``."""
    _train(trainer, 10**9, lambda: 0.0)


def no_loss(trainer: Any, *, steps: int) -> None:
    """Enters transactions and computes nothing in them."""
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction():
            pass


def long_batch(trainer: Any, *, steps: int) -> None:
    """Wants more samples a batch than there are."""
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=128):
                step.backward(model(shard.batch).mean())


def loses_two(trainer: Any, *, steps: int, step_s: float = 0.02) -> None:
    """Survives any single loss, but goes wrong where two ranks are lost within one step."""
    seen = {
        "step": -1,
        "world": 0,
        "before": 0,
    }  # ``before``: when the last step was computed for the last time

    def noise() -> float:
        if seen["step"] != trainer.step:
            seen.update(step=trainer.step, before=seen["world"])
            time.sleep(step_s)
        seen["world"] = trainer.world
        return 1.0 if seen["before"] - trainer.world >= 2 else 0.0

    _train(trainer, steps, noise)
