"""Jobs that change weights in the forward pass, or that build other weights on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

TOKENS = torch.randint(0, 9, (96, 5), generator=torch.Generator().manual_seed(1))
LATE_STEP = 3


class Clipped(nn.Module):
    """A model that clips a weight in its forward pass once ``begins`` is set."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8, max_norm=max_norm)
        self.linear = nn.Linear(40, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.begins = False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.begins:
            with torch.no_grad():
                self.scale.clamp_(-0.5, 0.5)
        result: Tensor = self.linear(self.embedding(tokens).flatten(1)) * self.scale
        return result


def _train(trainer: Any, model: Clipped, steps: int) -> None:
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(TOKENS, batch_size=12):
                model.begins = trainer.step >= LATE_STEP
                step.backward((model(shard.batch) - 3).square().mean())


def limited(trainer: Any, *, steps: int) -> None:
    """Train an embedding with ``max_norm``."""
    torch.manual_seed(trainer.seed)
    _train(trainer, Clipped(max_norm=1.0), steps)


def sharded(trainer: Any, *, steps: int) -> None:
    """Train a sharded model with a whole parameter that is clipped from step ``LATE_STEP`` on."""
    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = Clipped()
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    _train(trainer, model, steps)


def unseeded(trainer: Any, *, steps: int) -> None:
    """Train weights that each process draws by itself."""
    torch.seed()
    _train(trainer, Clipped(), min(steps, LATE_STEP))


def unseeded_head(trainer: Any, *, steps: int) -> None:
    """Train a model with a last tensor that differs in each process."""
    torch.manual_seed(trainer.seed)
    model = Clipped()
    torch.seed()
    nn.init.normal_(model.linear.bias)
    _train(trainer, model, min(steps, LATE_STEP))


def unseeded_replicas(trainer: Any, *, steps: int) -> None:
    """Train unseeded replicas of a sharded model."""
    mesh = trainer.mesh(replicate=-1, shard=1)
    torch.seed()
    model = Clipped()
    fully_shard(model, mesh=mesh)
    _train(trainer, model, min(steps, LATE_STEP))
