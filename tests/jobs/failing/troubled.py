"""Jobs that get into trouble by themselves: bad batches, slow code, workers that cannot be built."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chaoskit.fixtures.jobs.goal import Goal

DATA = torch.arange(512, dtype=torch.float32).view(128, 4) / 512


def _train(
    trainer: Any,
    steps: int,
    *,
    inside: Callable[[int], Tensor | float] = lambda shard: 1.0,
    outside: Callable[[], None] = lambda: None,
    step_s: Callable[[int], float] = lambda step: 0.0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a small replicated model.

    Args:
        inside: factor of a shard's loss.
        outside: called before each transaction.
        step_s: least time of a step.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    trainer.register(model=model, optimizer=optimizer, scheduler=scheduler, clip_norm=0.05)
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        outside()
        with trainer.transaction() as step:
            goal.pace(step_s(trainer.step))
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean() * inside(shard.index))


def plain(
    trainer: Any, *, steps: int, step_s: float = 0.0, until: dict[str, Any] | None = None
) -> None:
    """Train with clipped gradients, dropout and a changing learning rate, all of which must
    survive.
    """
    _train(trainer, steps, step_s=lambda step: step_s, until=until)


def with_a_process(trainer: Any, *, steps: int, step_s: float = 0.0) -> None:
    """Train beside a process of the job that never ends, as of a logger or a data loader."""
    subprocess.Popen(["sleep", "600"])
    _train(trainer, steps, step_s=lambda step: step_s)


def gives_up(trainer: Any) -> None:
    """Rehearse, and return in the first step, before it is committed."""
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.suppress(ValueError), trainer.transaction() as step:
        for number, shard in enumerate(step.shards(DATA, batch_size=24)):
            if number:
                raise ValueError("it was only looked at")
            step.backward(model(shard.batch).square().mean())


def chatty(
    trainer: Any, *, steps: int, step_s: float = 0.0, until: dict[str, Any] | None = None
) -> None:
    """Train; each rank prints a long line before each step."""

    def outside() -> None:
        print(f"step {trainer.step} {'.' * 400}")

    _train(trainer, steps, outside=outside, step_s=lambda step: step_s, until=until)


def bad_batches(
    trainer: Any, *, steps: int, bad: dict[str, list[int]], value: float | None = None
) -> None:
    """Train with losses of the shards ``bad[step]`` that are not finite, on any rank."""

    def inside(shard: int) -> float:
        return (value or math.nan) if shard in bad.get(str(trainer.step), ()) else 1.0

    _train(trainer, steps, inside=inside)


def wide(trainer: Any, *, steps: int, bad: dict[str, list[int]]) -> None:
    """Train on a batch of 96 samples, for as many shards."""
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=96):
                factor = math.nan if shard.index in bad.get(str(trainer.step), ()) else 1.0
                step.backward(model(shard.batch).square().mean() * factor)


def bad_at_first(trainer: Any, *, steps: int, at_step: int) -> None:
    """Train with NaN at one step, the first time that a process computes it, and never again."""
    shards: set[int] = set()

    def inside(shard: int) -> float:
        first = trainer.took_part and trainer.step == at_step and not shards
        shards.update([shard] if trainer.took_part and trainer.step == at_step else [])
        return math.nan if first else 1.0

    _train(trainer, steps, inside=inside)


def overflowing(trainer: Any, *, steps: int, at_step: int) -> None:
    """Train with a step in which the gradient of every shard is finite, and their sum is not."""
    torch.manual_seed(trainer.seed)
    weight = nn.Parameter(torch.zeros(16))
    model = nn.ParameterList([weight])
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=24):
                huge = 3e38 if trainer.took_part and trainer.step == at_step else 1.0
                step.backward((weight * huge).sum() + (weight * huge).sum() + shard.batch.mean())


def slow_to_leave(trainer: Any, *, steps: int, until: dict[str, Any] | None = None) -> None:
    """Train; the last rank is busy in its own code when it is to leave, until long after the others
    have met.
    """

    def outside() -> None:
        time.sleep(
            5.0 if trainer.elastic_event_detected() and trainer.rank == trainer.world - 1 else 0.0
        )

    _train(trainer, steps, outside=outside, step_s=lambda step: 0.02, until=until)


def with_a_slope(trainer: Any, *, steps: int) -> None:
    """Train a parameter ``slope`` with the gradient 1.5; flipping its bit 30 makes it NaN."""
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    model.register_parameter("slope", nn.Parameter(torch.zeros(1)))
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=24):
                step.backward(model(shard.batch).square().mean() + 1.5 * model.slope.sum())


def vigilant(trainer: Any, *, steps: int, waits: bool = False) -> None:
    """Train; at a loss that is not finite, raise an exception, or wait for a person."""
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 1)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    while trainer.step < steps:
        with trainer.transaction() as step:
            for shard in step.shards(DATA, batch_size=24):
                loss = model(shard.batch).square().mean()
                if not loss.isfinite():
                    while waits:
                        time.sleep(0.1)
                    raise FloatingPointError(f"the loss of step {trainer.step} is {loss.item()}")
                step.backward(loss)


def late_ones_fail(
    trainer: Any,
    *,
    steps: int,
    marker: str,
    failures: int,
    step_s: float,
    refuse: bool = False,
    until: dict[str, Any] | None = None,
) -> None:
    """Train; workers that start after the training began cannot be built, the first ``failures``
    times.
    """
    if Path(marker).exists():
        for number in range(failures):
            try:
                os.close(os.open(f"{marker}.{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if refuse:
                from chaoskit.errors import BadInput

                raise BadInput("disk", "full", "make room")
            raise OSError("this machine is not well")

    def outside() -> None:
        if trainer.step == 3:
            Path(marker).touch()

    _train(trainer, steps, outside=outside, step_s=lambda step: step_s, until=until)


def babbling(
    trainer: Any, *, steps: int, step_s: float, marker: str, until: dict[str, Any] | None = None
) -> None:
    """Train; at one step, rank 1 writes nonsense to every descriptor that it has inherited, once."""

    def outside() -> None:
        if trainer.rank != 1 or trainer.step != 6 or Path(marker).exists():
            return
        Path(marker).touch()
        for fd in range(3, 64):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as inherited:
                if (inherited.family, inherited.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                    inherited.send(b"\xff" * 64)

    _train(trainer, steps, outside=outside, step_s=lambda step: step_s, until=until)


def late_ones_differ(
    trainer: Any, *, steps: int, marker: str, step_s: float, until: dict[str, Any] | None = None
) -> None:
    """Train; a worker that starts after the training began computes with another precision, the
    first time.
    """
    if Path(marker).exists():
        try:
            os.close(os.open(f"{marker}.once", os.O_CREAT | os.O_EXCL))
            torch.set_float32_matmul_precision("medium")
        except FileExistsError:
            pass  # its successor computes like all others

    def outside() -> None:
        if trainer.step == 3:
            Path(marker).touch()

    _train(trainer, steps, outside=outside, step_s=lambda step: step_s, until=until)


def out_of_memory(trainer: Any, *, steps: int, at_step: int) -> None:
    """Train; the first process with rank 1 has no memory left for the reductions of a step."""

    def run_out(_: Any) -> None:
        if trainer.worker == "node1.0" and trainer.step == at_step:
            raise torch.OutOfMemoryError("out of memory")

    trainer._worker.hooks.injected.on_reduction.append(run_out)
    _train(trainer, steps)
