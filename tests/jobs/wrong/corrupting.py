"""A job in which one process silently flips bits of its own numbers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
STATE = ("weight", "frozen", "buffer", "optimizer", "rate")
WHERES = (*STATE, "gradient", "noise", "received", "own segment", "no number", "news")


class Flip:
    """Flips a bit in the first process with rank ``rank`` in step ``at_step`` that finds ``marker``
    missing.

    Args:
        where: one of ``WHERES``. ``noise``: the bit of another element of the gradient every time.
            ``no number``: a received NaN instead of a bit. ``news``: a loss that is received.
        sticky: repeat in this process; a replacement computes correctly.
        pause: steps between two bad ones of a ``sticky`` process.
    """

    def __init__(
        self,
        trainer: Any,
        where: str,
        rank: int,
        at_step: int,
        sticky: bool,
        marker: str,
        pause: int,
    ) -> None:
        self._trainer, self.where = trainer, where
        self._rank, self._at_step, self._sticky, self._marker = rank, at_step, sticky, marker
        self._mine = False
        self._pause, self._next_step = pause, 0
        self._count = 0  # number of noise flips, as two in a row must differ

    def due(self, where: str) -> bool:
        """Return True if a bit is to be flipped now."""
        trainer = self._trainer
        if self.where != where or not trainer.took_part:
            return False
        if self._mine:
            due = self._sticky and trainer.step >= self._next_step
            self._next_step = trainer.step + self._pause if due else self._next_step
            return due
        if (trainer.rank, trainer.step) != (self._rank, self._at_step):
            return False
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self._mine, self._next_step = True, trainer.step + self._pause
        return True

    def gradient(self, gradient: Tensor) -> Tensor:
        """Flip a bit of a parameter's gradient, as its hook."""
        if self.due("gradient"):
            return flipped(gradient, 0)
        if self.due("noise"):
            self._count += 1
            return flipped(gradient, self._count % gradient.numel())
        return gradient

    def watch(self, reducer: Any) -> None:
        """Damage the result of a reduction as soon as it is complete."""
        wait = reducer._wait

        def damage(works: Any) -> None:
            wait(works)
            world = reducer._member()
            if reducer._works or world.size == 1:
                return
            flat = reducer._buffers.flat
            if self.due("received"):
                is_exact = hasattr(reducer, "_plans")
                flip(reducer._plans[-1].segment_receives[0].tensor if is_exact else flat, 0)
            elif self.due("own segment"):
                flip(reducer._plans[-1].segment, 0)
            elif self.due("no number"):
                flat[0] = float("nan")
            elif self.due("news"):  # the exponent of the loss of shard 0, that of rank 0
                exact = hasattr(reducer, "_plans")
                flip(reducer._buffers.tails if exact else reducer._tail, 1 if exact else 3)

        reducer._wait = damage


def flip(tensor: Tensor, index: int) -> None:
    """Invert the lowest bit of an exponent, which doubles or halves the value; no version counter
    changes.
    """
    flat = tensor.data.view(-1)
    flat.view(torch.int32)[index] ^= 1 << 23


def flipped(tensor: Tensor, index: int) -> Tensor:
    copy = tensor.clone()
    flip(copy, index)
    return copy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, batch: Tensor) -> Any:
        return self.layers(batch) * self.frozen.sum() * self.scale.sum()


def _meet(trainer: Any, marker: str) -> None:
    """Wait for the other ranks, and for the file that the test makes."""
    Path(f"{marker}.rank{trainer.rank}").touch()
    awaited = [
        Path(f"{marker}.ready"),
        *(Path(f"{marker}.rank{rank}") for rank in range(trainer.world)),
    ]
    while not all(path.exists() for path in awaited):
        time.sleep(0.005)


def train(
    trainer: Any,
    *,
    steps: int,
    where: str = "",
    rank: int = 1,
    at_step: int = 6,
    sticky: bool = False,
    marker: str = "",
    pause: int = 0,
    outside: bool = False,
    meet: int = -1,
) -> None:
    """Train, with a bit flipped as :class:`Flip` defines.

    Args:
        outside: flip the weight between two steps, not in the forward pass of one.
        meet: step before which the ranks wait until all have committed the one before, and until
            the file ``marker`` + ".ready" exists.
    """
    torch.manual_seed(trainer.seed)
    model = Model()
    weight = model.layers[3].weight
    optimizer = torch.optim.Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=0.05)
    bad = Flip(trainer, where, rank, at_step, sticky, marker, pause)
    weight.register_hook(bad.gradient)
    bad.watch(trainer._work.reducer)

    def strike() -> None:
        for name, tensor in (("weight", weight), ("frozen", model.frozen), ("buffer", model.scale)):
            if bad.due(name):
                flip(tensor, 0)
        if bad.due("optimizer"):
            flip(optimizer.state[weight]["exp_avg_sq"], 0)
        if bad.due("rate"):
            optimizer.param_groups[0]["lr"] *= 2

    while trainer.step < steps:
        if trainer.step == meet:
            _meet(trainer, marker)
        if outside:
            strike()
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=24):
                if not outside:
                    strike()
                step.backward(model(shard.batch).square().mean())
    if bad.where == "end" and trainer.rank == rank:
        flip(weight, 0)
