"""Jobs with code that calls collectives between two steps, and breaks or misuses them."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
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
DATA = TensorDataset(
    torch.randn(64, 8, generator=_CHANCE), torch.randint(0, 4, (64,), generator=_CHANCE)
)
SHARDS = 5  # shards of the evaluation: more than ranks, and no multiple of them
FAULT_STEP = 6


def model_of(trainer: Trainer) -> nn.Sequential:
    torch.manual_seed(trainer.seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1])


class Trouble:
    """A kill, hang or delay of rank 1, once, at one place behind one step."""

    def __init__(self, trainer: Trainer, notes: str, where: str, act: str) -> None:
        self._trainer, self._where, self._act = trainer, where, act
        self._once = Path(notes) / "struck"

    def reach(self, where: str) -> None:
        trainer = self._trainer
        if (where, trainer.rank, trainer.step) != (
            self._where,
            1,
            FAULT_STEP,
        ) or self._once.exists():
            return
        self._once.touch()
        if self._act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep({"hang": 1e6, "slow": 4.0}[self._act])


def call_and_note(trainer: Trainer, model: nn.Module, notes: str, trouble: Trouble) -> None:
    """Note a line for the step: an evaluation, and numbers that would differ in a second call."""

    def evaluate(shard: int) -> torch.Tensor:
        trouble.reach("evaluation")
        inputs, targets = DATA.tensors
        noise = torch.rand(())  # seeded
        with torch.no_grad():
            return loss_of(model, (inputs[shard::SHARDS] + noise, targets[shard::SHARDS]))

    trouble.reach("before")
    score = trainer.all_reduce(evaluate, "mean", shards=SHARDS)
    trouble.reach("between")
    total = trainer.all_reduce(torch.tensor([secrets.randbelow(2**40)]))
    number = trainer.broadcast(lambda: secrets.randbelow(2**40), source=0)
    trainer.barrier()
    with (Path(notes) / trainer.worker).open("a") as file:
        file.write(f"{trainer.step} {score.item().hex()} {total[0]} {number}\n")


def train(trainer: Trainer, *, notes: str, steps: int, **how: Any) -> None:
    """Train a replicated model; see :func:`train_and_call` for ``how``."""
    train_and_call(trainer, model_of(trainer), notes, steps, **how)


def sharded(trainer: Trainer, *, notes: str, steps: int, **how: Any) -> None:
    """Train a model that needs all ranks for each forward pass."""
    mesh = trainer.mesh()
    model = model_of(trainer)
    fully_shard(model, mesh=mesh)
    train_and_call(trainer, model, notes, steps, **how)


def train_and_call(
    trainer: Trainer,
    model: nn.Sequential,
    notes: str,
    steps: int,
    *,
    until: dict[str, Any] | None = None,
    where: str = "",
    act: str = "kill",
) -> None:
    """Train, and call collectives behind each step; ``where`` and ``act`` define the
    :class:`Trouble` of rank 1.
    """
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    goal, trouble = Goal(trainer, steps, until), Trouble(trainer, notes, where, act)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace(0.02)
            for shard in step.shards(DATA, batch_size=8):
                step.backward(loss_of(model, shard.batch))
        call_and_note(trainer, model, notes, trouble)


def sharded_final(
    trainer: Trainer, *, notes: str, steps: int, where: str = "", act: str = "kill"
) -> None:
    """Train, and call collectives behind the loop, as a final evaluation."""
    mesh = trainer.mesh()
    model = model_of(trainer)
    fully_shard(model, mesh=mesh)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=8):
                step.backward(loss_of(model, shard.batch))
    call_and_note(trainer, model, notes, Trouble(trainer, notes, where, act))


def wrongly(trainer: Trainer, *, steps: int, how: str) -> None:
    """Make a misplaced call after some good ones."""
    misuse(trainer, model_of(trainer), steps, how)


def sharded_wrongly(trainer: Trainer, *, steps: int, how: str) -> None:
    """Make a misplaced call in a sharded job."""
    if how == "before the mesh":
        torch.distributed.get_rank()
    mesh = trainer.mesh()
    model = model_of(trainer)
    fully_shard(model, mesh=mesh)
    misuse(trainer, model, steps, how)


def misuse(trainer: Trainer, model: nn.Module, steps: int, how: str) -> None:
    """Train with a misplaced call behind step 3, or at the place ``how``."""
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    act: Callable[[], object] = {
        "without a group": lambda: torch.distributed.all_reduce(torch.ones(1)),
        "in a call": lambda: trainer.all_reduce(lambda shard: trainer.all_reduce(1.0), shards=2),
        "on one rank": lambda: trainer.barrier() if trainer.rank == 0 else None,
        "in another order": lambda: trainer.barrier() if trainer.rank else trainer.all_reduce(1.0),
    }.get(how, trainer.barrier)
    if how == "before a transaction":
        act()
    while trainer.step < steps:
        late = trainer.step == 3
        with trainer.transaction() as step:
            if late and how == "before the loop":
                act()
            for shard in step.shards(DATA, batch_size=8):
                step.backward(loss_of(model, shard.batch))
                if late and how == "in the loop":
                    act()
            trainer.barrier()  # the step is committed
        if late and how not in ("before the loop", "in the loop"):
            act()
