"""A sharded job whose first process on one rank never gets through a step: its collectives fail, time and again."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed import DistNetworkError
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset


def train(trainer: Any, *, steps: int = 12, bad_step: int = 5) -> None:
    torch.manual_seed(trainer.seed)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 8))
    first = trainer.disk / "first"
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                step.backward(model(shard.batch[0]).square().mean())
                if trainer.rank == 1 and trainer.step == bad_step:
                    if not first.exists():
                        first.write_text(str(os.getpid()))
                    if first.read_text() == str(os.getpid()):
                        raise DistNetworkError("a link that fails for this process only")
