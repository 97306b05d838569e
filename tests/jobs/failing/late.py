"""Jobs with a rank that is late for a plan, or never follows it."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512


def _train(trainer: Any, steps: int, outside: Callable[[], None]) -> None:
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    while trainer.step < steps:
        outside()
        with trainer.transaction() as step:
            time.sleep(0.02)
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean())


def late_for_a_growth(trainer: Any, *, steps: int, full: int, planned: str, seconds: float) -> None:
    """Keep the others waiting in a reduction, once, while the world has fewer ranks than ``full``.

    Rank 0 stays in a declared long phase until the file ``planned`` exists, and for ``seconds``
    more.
    """
    waited = False

    def outside() -> None:
        nonlocal waited
        if trainer.rank == 0 and trainer.step > 0 and trainer.world < full and not waited:
            waited = True
            with trainer.long_phase("waits for a plan"):
                _await(planned)
                time.sleep(seconds)

    _train(trainer, steps, outside)


def deaf_in_a_reduction(trainer: Any, *, steps: int, at_step: int, waits: str, deaf: str) -> None:
    """Make rank 2 wait before ``at_step`` until rank 1, which waits in the reduction, runs no
    Python any more.

    A thread of rank 1 takes the interpreter lock for ever once the file ``waits`` exists. It makes
    the file ``deaf`` just before.
    """

    def hold_lock() -> None:
        _await(waits)
        pause = ctypes.PyDLL(None).pause
        Path(deaf).touch()
        while True:
            pause()

    def outside() -> None:
        if trainer.step != at_step or Path(deaf).exists():
            return
        if trainer.rank == 1:
            threading.Thread(target=hold_lock, daemon=True).start()
        elif trainer.rank == 2:
            with trainer.long_phase("waits for a deaf rank"):
                _await(deaf)

    _train(trainer, steps, outside)


def _await(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.01)
