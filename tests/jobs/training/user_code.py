"""A job with code of its own around the loop over the shards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from chaoskit import Trainer
from chaoskit.fixtures.jobs.goal import Goal
from chaoskit.vocabulary import Phase

_CHANCE = torch.Generator().manual_seed(0)
DATA = TensorDataset(
    torch.randn(64, 8, generator=_CHANCE), torch.randint(0, 4, (64,), generator=_CHANCE)
)
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
    """Train, and note worker and step behind each transaction.

    Args:
        evaluate_s: duration of the code between the first step and the second.
        autocast: run the whole loop in an autocast context.
        stop_early: leave the loop before its end.
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


class _Between(torch.autograd.Function):
    """A function that calls ``act`` in the backward pass, when the gradients of all later layers
    are there.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, act: Callable[[], None]) -> Tensor:
        context.act = act
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.act()
        return gradients[0], None


def fails_in_backward(trainer: Trainer, *, steps: int, at_step: int, caught: str) -> None:
    """Train; the backward pass of each shard of rank 1 fails once in a step, half-way, and is
    repeated.

    Args:
        caught: where the exception is caught: around the pass (``pass``), or around the transaction
            (``block``).
    """
    torch.manual_seed(trainer.seed)
    first, last = nn.Linear(8, 16), nn.Linear(16, 16)
    model = nn.ModuleList([first, last])
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    failed: set[int] = set()

    def loss_of(shard: Any) -> Tensor:
        def fail() -> None:
            if trainer.step == at_step and trainer.rank == 1 and shard.index not in failed:
                failed.add(shard.index)
                raise TimeoutError("this backward pass fails")

        return cross_entropy(
            last(_Between.apply(torch.tanh(first(shard.batch[0])), fail)), shard.batch[1]
        )

    while trainer.step < steps:
        try:
            with trainer.transaction() as step:
                for shard in step.shards(DATA, batch_size=8):
                    try:
                        step.backward(loss_of(shard))
                    except TimeoutError:
                        _require_phase(trainer, Phase.FORWARD)
                        if caught == "block":
                            raise
                        step.backward(loss_of(shard))
        except TimeoutError:
            _require_phase(trainer, Phase.OUTSIDE)


def _require_phase(trainer: Any, phase: Phase) -> None:
    if (shown := trainer._worker.board.phase) is not phase:
        raise RuntimeError(
            f"code that may take its time is shown as {shown.label}, not as {phase.label}"
        )


def note(trainer: Trainer, notes: str) -> None:
    with (Path(notes) / trainer.worker).open("a") as file:
        file.write(f"{trainer.step}\n")
