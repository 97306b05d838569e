"""A job with ranks that wait for a file: in the first steps of a larger world, before others, or at the
end.
"""

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
    world: int = 0,
    file: str = "",
    gates: dict[str, str] | None = None,
    step_s: float = 0.0,
    full: int = 0,
    last: str = "",
    until: dict[str, Any] | None = None,
) -> None:
    """Train a small replicated model.

    Each wait takes ``PATIENCE_S`` at most. The unbroken run, which has no goal, does not wait.

    Args:
        world: size of the world that waits for ``file`` inside the step, before they compute;
            0: none.
        gates: step -> file for which each rank waits before it.
        full: steps take 0.1 s while there are fewer ranks.
        last: file for which the last rank waits before it is done.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        if until is not None and (gate := (gates or {}).get(str(trainer.step))):
            _wait_for(trainer, Path(gate))
        with trainer.transaction() as step:
            goal.pace(step_s if trainer.world >= full else 0.1)
            if trainer.took_part and trainer.world == world and until is not None:
                _wait_for(trainer, Path(file))
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean())
    if until is not None and last and trainer.rank == trainer.world - 1:
        _wait_for(trainer, Path(last))


def _wait_for(trainer: Any, file: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with trainer.long_phase("wait"):
        while not file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.005)
