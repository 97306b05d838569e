"""Optimizers of a script's own, which keep their state in unusual places."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

DATA = torch.arange(384, dtype=torch.float32).reshape(96, 4).sin()


class Averaging(Optimizer):
    """An optimizer that averages its last three gradients, kept in a list, and counts its steps on
    itself.
    """

    def __init__(self, parameters: Any, lr: Any) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["last"] = [*state.get("last", [])[-2:], parameter.grad.clone()]
                rate = float(group["lr"]) / (1 + 0.01 * self.count)
                parameter.add_(sum(state["last"]), alpha=-rate / len(state["last"]))


class Hoarding(Averaging):
    """An optimizer that keeps a tensor of each parameter on itself, from its third step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.count > 2:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            self.means = {parameter: parameter.detach().mean() for parameter in parameters}


def _train(trainer: Any, model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    trainer.register(model=model, optimizer=optimizer)
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=12):
                step.backward(model(shard.batch).square().mean())


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def averaging(trainer: Any, *, steps: int) -> None:
    torch.manual_seed(trainer.seed)
    model = _network()
    _train(trainer, model, Averaging(model.parameters(), lr=np.float32(0.1)), steps)


def sharded(trainer: Any, *, steps: int) -> None:
    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = _network()
    fully_shard(model, mesh=mesh)
    _train(trainer, model, Averaging(model.parameters(), lr=np.float32(0.1)), steps)


def hoarding(trainer: Any, *, steps: int) -> None:
    torch.manual_seed(trainer.seed)
    model = _network()
    _train(trainer, model, Hoarding(model.parameters(), lr=0.1), steps)
