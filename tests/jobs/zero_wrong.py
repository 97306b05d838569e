"""Mistakes that a job with ZeRO-1 can make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from chaoskit.runtime.zero import ZeroOptimizer


def train(trainer: Any, *, steps: int = 3, how: str = "") -> None:
    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if how == "batchnorm" else nn.LayerNorm(8))
    kind = torch.optim.Muon if how == "muon" else torch.optim.SGD
    parameters = model[0].parameters() if how == "partly" else model.parameters()
    if how == "both":
        fully_shard(model, mesh=mesh)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if how != "neither":
        optimizer = ZeroOptimizer(parameters, kind, mesh=mesh, lr=0.1)
    trainer.register(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(64, 8))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(data, batch_size=8):
                step.backward(model(shard.batch[0]).square().mean())
