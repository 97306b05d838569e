"""A job in which all workers end themselves, at chosen moments of the update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chaoskit.fixtures.jobs.goal import Goal
from chaoskit.process.progress_board import _COPIED

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512
PATIENCE_S = 60.0


class Doom:
    """Ends the ranks ``fatal[step]`` of a step, once in a run, when all of them have reached
    ``where``.

    Args:
        where: ``forward``, ``backward``, ``update`` (before any write) or ``torn`` (half of it is
            written).
        marker: path prefix of files that record which ranks have ended already.
        ahead: a rank that begins the next step before the others end.
        copied: ranks that wait for a copy of their state before they end. None: the first ranks
            that have copies, which wait before each step if ranks are to be torn.
        paced: the ranks wait for copies in any case.
    """

    def __init__(
        self,
        trainer: Any,
        fatal: dict[str, list[int]],
        where: str,
        marker: str,
        ahead: int | None = None,
        copied: list[int] | None = None,
        paced: bool = False,
    ) -> None:
        self._trainer, self._fatal, self._where, self._marker = trainer, fatal, where, marker
        self._ahead, self._copied, self._paced = ahead, copied, paced

    def begin(self) -> None:
        """Signal that this rank begins a step, if it is the rank that is to be ahead."""
        trainer = self._trainer
        if self._marker and trainer.took_part and trainer.rank == self._ahead:
            self._begun(trainer.step).touch()

    def strike(self, where: str, weights: torch.Tensor) -> None:
        """End this process if this is its place and step; otherwise return."""
        trainer = self._trainer
        doomed = self._fatal.get(str(trainer.step), []) if trainer.took_part else []
        doomed = [
            rank for rank in doomed if rank < trainer.world
        ]  # not all ranks are back after a loss
        if where != self._where or trainer.rank not in doomed or not self._is_first(trainer.rank):
            return
        if where == "torn":
            weights.detach().view(-1)[: weights.numel() // 2] += 1e6
        awaited = [self._file(rank) for rank in doomed]
        awaited += [] if self._ahead is None else [self._begun(trainer.step + 1)]
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(file.exists() for file in awaited) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def await_copy(self) -> None:
        """Let the agents copy the state before a step that may be torn, even on a busy machine.

        Training itself waits 20 ms at most.
        """
        trainer = self._trainer
        awaits = (
            self._fatal
            and (self._where == "torn" or self._paced)
            and not (self._ahead is not None and self._struck())
        )
        copies = trainer.config.memory_copies if awaits else 0
        waiting: Container[int] = range(min(copies, self._copies_awaited()))
        if self._copied is not None:
            waiting = (
                self._copied
                if str(trainer.step) in self._fatal and not self._file(trainer.rank).exists()
                else ()
            )
        if trainer.rank not in waiting or not trainer.took_part:
            return
        with trainer.long_phase("copy"):
            deadline_s = time.monotonic() + PATIENCE_S
            while (
                trainer._worker.board._slots[_COPIED] < trainer.step
                and time.monotonic() < deadline_s
            ):
                time.sleep(0.001)

    def _struck(self) -> bool:
        """Return True if some rank has ended.

        Then the copy of another rank may exist, as two ranks may be on one node.
        """
        marker = Path(self._marker)
        return any(marker.parent.glob(f"{marker.name}.[0-9]*"))

    def _copies_awaited(self) -> int:
        return 1 if self._ahead is None else 2  # the first copy may be that of the rank ahead

    def _begun(self, step: int) -> Path:
        return Path(f"{self._marker}.begun.{step}")

    def _file(self, rank: int) -> Path:
        return Path(f"{self._marker}.{self._trainer.step}.{rank}")

    def _is_first(self, rank: int) -> bool:
        try:
            self._file(rank).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class DoomedAdam(torch.optim.Adam):
    """An Adam optimizer that strikes inside its update."""

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
    fatal: dict[str, list[int]] = {},  # noqa: B006 - not changed
    where: str = "torn",
    marker: str = "",
    ahead: int | None = None,
    copied: list[int] | None = None,
    frozen_mb: int = 0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a small replicated model; ranks end as :class:`Doom` defines.

    Args:
        frozen_mb: size of weights that are not trained, so that a copy of the state costs as much
            as many steps may take.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))
    if frozen_mb:
        model.register_parameter(
            "frozen", nn.Parameter(torch.zeros(frozen_mb * 2**18), requires_grad=False)
        )
    doom = Doom(trainer, fatal, where, marker, ahead, copied, paced=frozen_mb > 0)
    optimizer = DoomedAdam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], doom
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            doom.begin()
            doom.await_copy()
            goal.pace(step_s)
            for shard in step.shards(DATA, batch_size=24):
                loss = model(shard.batch).square().mean()
                doom.strike("forward", model[0].weight)
                step.backward(loss)
                doom.strike("backward", model[0].weight)
