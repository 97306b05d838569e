"""A job whose workers end themselves, all of them, at chosen moments of the update."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chaoskit.runtime.board import _COPIED

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
PATIENCE_S = 5.0


class Doom:
    """Ends the ranks ``fatal[step]`` of a step, once in a run, when all of them have come to the place ``where``.

    Args:
        where: ``forward``, ``backward``, ``update`` (before anything is written) or ``torn`` (half of it is written).
        marker: path of files that tell who has ended already.
    """

    def __init__(self, trainer: Any, fatal: dict[str, list[int]], where: str, marker: str) -> None:
        self._trainer, self._fatal, self._where, self._marker = trainer, fatal, where, marker

    def strike(self, where: str, weights: torch.Tensor) -> None:
        """Does not return if this is the place."""
        trainer = self._trainer
        doomed = self._fatal.get(str(trainer.step), []) if trainer.took_part else []
        if where != self._where or trainer.rank not in doomed or not self._is_first(trainer.rank):
            return
        if where == "torn":
            weights.detach().view(-1)[: weights.numel() // 2] += 1e6
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(self._file(rank).exists() for rank in doomed) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def await_copy(self) -> None:
        """Before a step that may be torn: let the agent of rank 0 copy the state, however busy the machine
        is. Training itself waits 20 ms at most."""
        trainer = self._trainer
        copies = trainer.config.memory_copies and self._where == "torn" and self._fatal
        if not copies or trainer.rank != 0 or not trainer.took_part:
            return
        with trainer.long_phase("copy"):
            deadline_s = time.monotonic() + PATIENCE_S
            while trainer._worker.board._slots[_COPIED] < trainer.step and time.monotonic() < deadline_s:
                time.sleep(0.001)

    def _file(self, rank: int) -> Path:
        return Path(f"{self._marker}.{self._trainer.step}.{rank}")

    def _is_first(self, rank: int) -> bool:
        try:
            self._file(rank).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class DoomedAdam(torch.optim.Adam):
    """Strikes inside its update."""

    def __init__(self, parameters: Any, doom: Doom) -> None:
        super().__init__(parameters, lr=1e-2)
        self._doom = doom

    def step(self, closure: Any = None) -> Any:
        for where in ("update", "torn"):
            self._doom.strike(where, self.param_groups[0]["params"][0])
        return super().step(closure)


def train(
    trainer: Any,
    *,
    steps: int,
    step_s: float = 0.0,
    fatal: dict[str, list[int]] = {},  # noqa: B006 - is not changed
    where: str = "torn",
    marker: str = "",
) -> None:
    """See :class:`Doom`."""
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    doom = Doom(trainer, fatal, where, marker)
    optimizer = DoomedAdam(model.parameters(), doom)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler)
    while trainer.step < steps:
        with trainer.transaction() as step:
            doom.await_copy()
            time.sleep(step_s)
            for shard in step.shards(DATA, batch_size=24):
                loss = model(shard.batch).square().mean()
                doom.strike("forward", model[0].weight)
                step.backward(loss)
            doom.strike("backward", model[0].weight)
