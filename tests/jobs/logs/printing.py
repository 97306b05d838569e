"""A job with ranks that print their progress for log rules."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512


def train(
    trainer: Any,
    *,
    steps: int,
    step_s: float = 0.04,
    printers: list[int] | None = None,
    nan_from: int | None = None,
    stop_at: int | None = None,
    riddle_at: int | None = None,
    hold_at: int | None = None,
    file: str = "",
    until: dict[str, Any] | None = None,
) -> None:
    """Train; each rank prints the loss of each of its shards, and the time without the wait for
    others.

    Args:
        step_s: least time of a shard.
        printers: ranks that print; None for all.
        nan_from: step from which the printed loss is NaN, on every rank; the loss itself is not.
        stop_at: step in which every rank prints that it is about to stop.
        hold_at: step in which every rank waits until ``file`` exists; printers keep printing.
        riddle_at: step in which every rank prints a line on which ``(a+)+$`` backtracks practically
            for ever.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer.register(model=model, optimizer=optimizer)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(DATA, batch_size=24):
                begun_s = time.monotonic()
                time.sleep(step_s)
                loss = model(shard.batch).square().mean()
                step.backward(loss)
                # every worker has rank 0 in the rehearsal, alone in its world
                prints = printers is None or (trainer.took_part and trainer.rank in printers)
                while trainer.step == hold_at and not Path(file).exists():
                    time.sleep(step_s)
                    if prints:
                        print(
                            f"step {trainer.step} loss {loss.item():.6f} took {step_s * 1000:.1f} ms, and waits"
                        )
                if not prints:
                    continue
                shown = (
                    math.nan if nan_from is not None and trainer.step >= nan_from else loss.item()
                )
                took_ms = (time.monotonic() - begun_s) * 1000
                print(f"step {trainer.step} loss {shown:.6f} took {took_ms:.1f} ms")
                if trainer.step == stop_at:
                    print("the last lines are coming")
                if trainer.step == riddle_at:
                    print("a" * 64 + "!")
