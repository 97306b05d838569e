"""Healthy training jobs with phases of very different lengths, none of them a failure; for
``suspects.py``.

The moments of slow phases are drawn from the step and the shard, so that every run has the same
unevenness even if ranks are replaced.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from chaoskit import Trainer
from chaoskit.fixtures.jobs.goal import Goal

_ROWS, _WIDTH = 960, 64


class Rows(Dataset[Tensor]):
    """Random rows; each ``every``-th takes ``stall_s`` to read, as from storage that is slow now
    and then.
    """

    def __init__(self, every: int = 1, stall_s: float = 0.0) -> None:
        self._rows = torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(1))
        self._every, self._stall_s = every, stall_s

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        if self._stall_s and index % self._every == 0:
            time.sleep(self._stall_s)
        return self._rows[index]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, 128), nn.GELU(), nn.Linear(128, 8))


def sequences(
    trainer: Trainer,
    *,
    steps: int,
    usual_s: float = 0.05,
    until: dict[str, Any] | None = None,
    batch: int = 24,
) -> None:
    """Train on sequences of very different lengths, with all that interrupts a real loop.

    These are long sequences on all ranks or in one shard (ten times the usual), slow storage, and
    slow passages of the data. There are also recompilations, declared evaluations, a pause on one
    rank, and a garbage collection with the interpreter lock held.
    """
    torch.manual_seed(trainer.seed)
    model = _model()
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    goal, data, heap = Goal(trainer, steps, until), Rows(every=97, stall_s=0.3), []
    while goal.is_ahead():
        begun = trainer.step
        long_for_all = random.Random(begun).random() < 0.05
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(data, batch_size=batch):
                draw = random.Random(begun * 31 + shard.index)
                is_long = long_for_all or draw.random() < 0.03
                shard_s = usual_s * (10 if is_long else draw.choice([0.5, 1, 1, 1, 2, 3]))
                time.sleep(shard_s + (1.2 if begun % 61 == 60 else 0.0))
                if begun % 83 == 40 and shard.index == 2:
                    heap = heap or [[number] for number in range(1_500_000)]
                    gc.collect()
                rows = shard.batch
                if begun % 150 == 100:
                    rows = torch.cat([rows, rows[: 1 + begun // 150]])
                step.backward(compiled(rows).square().mean())
        if trainer.step % 40 == 0:
            with trainer.long_phase("evaluation"):
                time.sleep(4.0 if trainer.rank == 0 else 0.5)
        if trainer.step % 55 == 0 and trainer.rank == 0:
            time.sleep(3.0)


def stalling_loader(
    trainer: Trainer, *, steps: int, until: dict[str, Any] | None = None, batch: int = 24
) -> None:
    """Train from storage that answers at once, or after half a second, or (once in 300 steps) after
    five.
    """
    torch.manual_seed(trainer.seed)
    model = _model()
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    goal, data = Goal(trainer, steps, until), Rows(every=61, stall_s=0.5)
    while goal.is_ahead():
        begun = trainer.step
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(data, batch_size=batch):
                if begun % 300 == 150 and shard.index == begun % 6:
                    time.sleep(5.0)
                time.sleep(0.02)
                step.backward(model(shard.batch).square().mean())


def adversarial(
    trainer: Trainer, *, steps: int, until: dict[str, Any] | None = None, batch: int = 24
) -> None:
    """Train a generator and its critic, with an optimizer each, on batches of one to forty parts."""
    torch.manual_seed(trainer.seed)
    model = nn.ModuleDict({"generator": nn.Linear(16, _WIDTH), "critic": nn.Linear(_WIDTH, 1)})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-4) for part in model.values()]
    trainer.register(model=model, optimizer=optimizers)
    goal, data = Goal(trainer, steps, until), Rows()
    while goal.is_ahead():
        begun = trainer.step
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(data, batch_size=batch):
                draw = random.Random(begun * 17 + shard.index)
                for _ in range(
                    1 if draw.random() < 0.9 else draw.randint(10, 40)
                ):  # parts of a large batch
                    time.sleep(0.025)
                fake = model["generator"](shard.batch[:, :16])
                critic = model["critic"](shard.batch).mean() - model["critic"](fake.detach()).mean()
                step.backward(critic - model["critic"](fake).mean())


def recompiling(
    trainer: Trainer, *, steps: int, until: dict[str, Any] | None = None, batch: int = 24
) -> None:
    """Train a compiled model on shapes of which a new one comes every few steps."""
    torch.manual_seed(trainer.seed)
    model = _model()
    trainer.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    goal, data = Goal(trainer, steps, until), Rows()
    while goal.is_ahead():
        begun = trainer.step
        if begun % 120 == 0:
            torch.compiler.reset()  # else the limit of compiled shapes is reached, and all runs eagerly from then on
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(data, batch_size=batch):
                rows = (
                    shard.batch
                    if begun % 20
                    else torch.cat([shard.batch, shard.batch[: 1 + begun % 120 // 20]])
                )
                time.sleep(0.02)
                step.backward(compiled(rows).square().mean())
