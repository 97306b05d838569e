"""Turns between the reference job and another job: before each block of steps, a rank waits for the
token of its side.

The ranks of both jobs connect to the referee (referee.py) over one socket. A rank that waits is
blocked in a read, and uses no CPU. Chaoskit's job is :func:`train`; the job of plain PyTorch is in
baseline_ddp.py.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from chaoskit.fixtures.jobs.corpus import ByteDataset, corpus_file
from chaoskit.fixtures.jobs.gpt import build, choose, warmup_cosine
from chaoskit.fixtures.jobs.gpt_model import next_byte_loss

#: Every rank takes so many steps before it waits for its first turn: then it is known to work.
BEFORE = 1


class Turns:
    """A rank's connection to the referee, over which it gets the token.

    Args:
        path: the socket of the referee.
        side: ``ddp`` or ``ours``.
        block: the number of steps in a turn.
    """

    def __init__(self, path: str, side: str, rank: int, block: int) -> None:
        self._block, self._seconds = block, list[float]()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(path)
        self._lines = self._connection.makefile("rb")
        self._send({"side": side, "rank": rank})

    def _send(self, what: Any) -> None:
        self._connection.sendall(json.dumps(what).encode() + b"\n")

    def note(self, seconds: float) -> bool:
        """Record the seconds of a step and return whether the turn ends with it."""
        self._seconds.append(seconds)
        return len(self._seconds) == self._block

    def hand_over(self) -> None:
        """Send the seconds of the steps of this turn to the referee, which passes the token on."""
        self._send(self._seconds)
        self._seconds = []

    def wait(self) -> None:
        """Return when it is this side's turn. Raises ConnectionError if the referee has ended."""
        if not self._lines.readline():
            raise ConnectionError("the referee has ended: the other job failed")

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lines.close()  # the descriptor is closed with the last of both
        self._connection.close()


def steps_of(turns: int, block: int) -> int:
    """Return the number of steps of a run of ``turns`` turns."""
    return BEFORE + turns * block


def take_turns(step: Callable[[], None], join: Callable[[], Turns], steps: int, block: int) -> None:
    """Run the steps of plain PyTorch in turns; ``step`` is called once for each, and never
    again.
    """
    for _ in range(BEFORE):
        step()
    with join() as turns:
        for number in range(steps - BEFORE):
            if number % block == 0:
                turns.wait()
            begin_s = time.perf_counter()
            step()
            if turns.note(time.perf_counter() - begin_s):
                turns.hand_over()


def train(
    trainer: Any, *, steps: int, size: str, referee: str, block: int, loader: bool = False
) -> None:
    """Train as the job ``gpt`` does; between two turns all ranks wait in a long phase, so that none
    is called hung.
    """
    shape = choose(size, steps=steps)
    dataset = ByteDataset(corpus_file(shape.corpus_bytes), shape.context)
    torch.manual_seed(trainer.seed)
    model = build(shape, dropout=0.1)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, warmup_cosine(steps))
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=1.0)
    turns: Turns | None = None
    while trainer.step < steps:
        begin_s = time.perf_counter()
        with trainer.transaction() as step:
            for shard in step.shards(dataset, batch_size=shape.batch, prefetch=loader):
                step.backward(next_byte_loss(model, shard.batch))
        seconds = time.perf_counter() - begin_s
        if trainer.step < BEFORE:
            continue
        if turns is None:
            turns = Turns(referee, "ours", trainer.rank, block)
        elif not turns.note(seconds):
            continue
        else:
            turns.hand_over()
        if trainer.step < steps:
            with trainer.long_phase("turn"):
                turns.wait()
