"""A job in which ranks hang at one step, each once: between two steps, inside one, or in a declared
phase.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
FAULT_STEP = 6
PAUSE_S = 0.01


def train(
    trainer: Any, *, steps: int, marks: str, until: dict[str, Any] | None = None, **how: Any
) -> None:
    """Train a small replicated model; see :class:`Standstill` for the options ``how``."""
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    _train(trainer, model, Goal(trainer, steps, until), Standstill(trainer, Path(marks), **how))


def sharded(
    trainer: Any, *, steps: int, marks: str, until: dict[str, Any] | None = None, **how: Any
) -> None:
    """Train the same model, sharded over the ranks."""
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model, mesh=trainer.mesh())
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    _train(trainer, model, Goal(trainer, steps, until), Standstill(trainer, Path(marks), **how))


def _train(trainer: Any, model: nn.Module, goal: Goal, standstill: Standstill) -> None:
    while goal.is_ahead():
        standstill.reach("outside")
        with trainer.transaction() as step:
            goal.pace(PAUSE_S)
            for shard in step.shards(DATA, batch_size=24):
                standstill.reach("inside")
                step.backward(model(shard.batch).square().mean())


class Standstill:
    """Makes a rank hang at the place and step, unless a rank with its number has hung before.

    Args:
        marks: directory with a file for each rank that has hung.
        where: ``outside``, ``inside``, or ``long`` for a declared phase between two steps.
        ranks: ranks with a lower number hang.
        for_s: running time of the process after which a rank goes on, in pieces of ``PAUSE_S``; 0:
            never.
        deaf: the ranks hold the interpreter lock, so that no other thread of the process runs.
    """

    def __init__(
        self,
        trainer: Any,
        marks: Path,
        *,
        where: str,
        ranks: int,
        for_s: float = 0.0,
        deaf: bool = False,
    ) -> None:
        self._trainer, self._marks = trainer, marks
        self._where, self._ranks, self._for_s, self._deaf = where, ranks, for_s, deaf

    def reach(self, place: str) -> None:
        """Hang here, if this is the place and the step."""
        trainer = self._trainer
        if trainer.step != FAULT_STEP or trainer.rank >= self._ranks:
            return
        if place != ("inside" if self._where == "inside" else "outside") or not self._is_first():
            return
        if self._where == "long":
            with trainer.long_phase("wait"):
                self._stand()
        else:
            self._stand()

    def _is_first(self) -> bool:
        try:
            (self._marks / str(self._trainer.rank)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _stand(self) -> None:
        if self._deaf:
            ctypes.PyDLL(None).sleep(1000)
        pieces = 0
        while not self._for_s or pieces * PAUSE_S < self._for_s:
            time.sleep(PAUSE_S)
            pieces += 1
