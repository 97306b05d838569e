"""Small jobs for this suite: one that is easy to break, and healthy ones that look broken."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.fixtures.jobs.goal import Goal

_DATA = torch.rand(480, 8, generator=torch.Generator().manual_seed(5))
_BATCH = 48  # a multiple of 2, 3 and 4 shards


class _Net(nn.Module):
    """Model with all that a restore may forget: statistics, dropout, state of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(24, 1)

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(batch))
        return output


def _train(
    trainer: Any,
    steps: int,
    *,
    outside: Callable[[nn.Module], None] = lambda model: None,
    delay_s: Callable[[], float] = lambda: 0.0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train until the goal is reached.

    Args:
        outside: called with the model before each transaction.
        delay_s: returns the duration of a step, in seconds.
    """
    torch.manual_seed(trainer.seed)
    model = _Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=0.5)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        outside(model)
        with trainer.transaction() as step:
            goal.pace(delay_s())
            for shard in step.shards(_DATA, batch_size=_BATCH):
                target = shard.batch.sum(1, keepdim=True).sin()
                step.backward(nn.functional.mse_loss(model(shard.batch), target))


def steady(
    trainer: Any,
    *,
    steps: int,
    step_s: float = 0.015,
    full: int = 0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train with steps of equal length; longer ones while the world has fewer ranks than ``full``.

    Args:
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    _train(trainer, steps, delay_s=lambda: step_s if trainer.world >= full else 0.1, until=until)


def writing(trainer: Any, *, steps: int, size_bytes: int = 2**18) -> None:
    """Train like :func:`steady`, and write a file between two steps, synced to the disk."""

    def outside(model: nn.Module) -> None:
        file = os.open(Path(trainer.disk) / "written", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            os.pwrite(file, bytes([trainer.step % 256]) * size_bytes, 0)
            os.fsync(file)
        finally:
            os.close(file)

    _train(trainer, steps, outside=outside, delay_s=lambda: 0.015)


def evaluating(trainer: Any, *, steps: int, seconds: float) -> None:
    """Train, and evaluate for long on rank 1, twice, as a declared long phase."""

    def outside(model: nn.Module) -> None:
        if trainer.rank == 1 and trainer.step in (6, 12):
            with trainer.long_phase("evaluation"), torch.no_grad():
                model.eval()
                model(_DATA)
                time.sleep(seconds)
                model.train()

    _train(trainer, steps, outside=outside, delay_s=lambda: 0.01)


def saving(trainer: Any, *, steps: int, seconds: float) -> None:
    """Train, and sleep for long between two steps on rank 0, without a declared phase."""

    def outside(model: nn.Module) -> None:
        if trainer.rank == 0 and trainer.step == 10:
            time.sleep(seconds)

    _train(trainer, steps, outside=outside, delay_s=lambda: 0.01)


def compiling(trainer: Any, *, steps: int, seconds: float) -> None:
    """Train, and compile a function for long in the middle of a step, on the last rank."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    measure = torch.compile(lambda batch: batch.sin().sum(), backend=backend)

    def delay_s() -> float:
        if trainer.took_part and trainer.step == 10 and trainer.rank == trainer.world - 1:
            measure(_DATA)
        return 0.01

    _train(trainer, steps, delay_s=delay_s)


def starting_slowly(trainer: Any, *, steps: int, seconds: float) -> None:
    """Train, with a process of rank 1 that needs long until it can begin."""
    if trainer.worker == "node1.0":
        time.sleep(seconds)
    _train(trainer, steps, delay_s=lambda: 0.01)


def uneven(trainer: Any, *, steps: int) -> None:
    """Train with steps that differ by up to five times, on every rank in another way."""
    _train(trainer, steps, delay_s=lambda: 0.02 * (1 + (3 * trainer.step + 2 * trainer.rank) % 5))


def growing(trainer: Any, *, steps: int) -> None:
    """Train with steps that grow to four times the first."""
    _train(trainer, steps, delay_s=lambda: 0.02 * (1 + 3 * trainer.step / steps))
