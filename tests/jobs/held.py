"""A job whose ranks wait, in the first steps of a larger world, until a file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
PATIENCE_S = 60.0


def train(
    trainer: Any,
    *,
    steps: int,
    world: int,
    file: str,
    step_s: float = 0.0,
    full: int = 0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a small replicated model.

    Args:
        world: of so many ranks, which wait for ``file`` inside the step, before they compute. Each waits
            ``PATIENCE_S`` at most.
        full: steps take 0.1 s while there are fewer ranks.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(step_s if trainer.world >= full else 0.1)
            if trainer.took_part and trainer.world == world and until is not None:
                _wait_for(trainer, Path(file))
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean())


def _wait_for(trainer: Any, file: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with trainer.long_phase("wait"):
        while not file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
