"""A job with code of its own around the loop over the shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from chaoskit import Trainer
from chaoskit.fixtures.jobs.goal import Goal

_CHANCE = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(64, 8, generator=_CHANCE), torch.randint(0, 4, (64,), generator=_CHANCE))
Until = dict[str, Any] | None


def train(
    trainer: Trainer,
    *,
    notes: str,
    steps: int,
    until: Until = None,
    evaluate_s: float = 0.0,
    autocast: bool = False,
    stop_early: bool = False,
) -> None:
    """Notes worker and step behind each transaction.

    Args:
        evaluate_s: so long takes the code between the first step and the second.
        autocast: the whole loop stands in an autocast context.
        stop_early: the loop is left before its end.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(0.02)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                for shard in step.shards(DATA, batch_size=8):
                    step.backward(cross_entropy(model(shard.batch[0]).float(), shard.batch[1]))
                    if stop_early:
                        break
        note(trainer, notes)
        if trainer.step == 1:
            time.sleep(evaluate_s)


def sharded(trainer: Trainer, *, notes: str, steps: int, until: Until = None) -> None:
    torch.manual_seed(trainer.seed)
    mesh = trainer.mesh()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    fully_shard(model, mesh=mesh)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(0.02)
            for shard in step.shards(DATA, batch_size=8):
                step.backward(cross_entropy(model(shard.batch[0]), shard.batch[1]))
        note(trainer, notes)


def note(trainer: Trainer, notes: str) -> None:
    with (Path(notes) / trainer.worker).open("a") as file:
        file.write(f"{trainer.step}\n")
