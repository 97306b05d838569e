"""A job that registers hooks, and logs the order of all events with the worker of each line."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from chaoskit.errors import BadInput
from chaoskit.fixtures.jobs.goal import Goal

PATIENCE_S = 60.0
DATA = torch.arange(1024, dtype=torch.float32).view(256, 4) / 1024


def tell(trainer: Any, what: str, **fields: Any) -> None:
    """Print one line to the log of this worker."""
    print(
        json.dumps({"what": what, "at": trainer.step, "rank": trainer.rank, **fields}), flush=True
    )


def sign_of(trainer: Any, world: int) -> Path:
    """Return a file that exists when a world of ``world`` ranks has committed a step."""
    return Path(trainer.disk).parent / f"step in a world of {world}"


def name_hooks(
    trainer: Any, model: nn.Module, fails: str, takes_s: float, awaits_world: int = 0
) -> None:
    """Register a hook of each kind, which logs its calls.

    Args:
        fails: the hook that raises, ``on_resize`` or ``on_preempt``; with ``!``, it raises
            BadInput.
        takes_s: duration of ``on_preempt``.
        awaits_world: ``on_preempt`` waits until a world of so many ranks has committed a step.
    """

    def maybe_fail(hook: str) -> None:
        if fails == hook:
            raise ValueError("the hook is wrong")
        if fails == f"{hook}!":
            raise BadInput("hook", hook, "mend it")

    @trainer.on_resize
    def resized(event: Any) -> None:
        tell(trainer, "on_resize", world=trainer.world, **asdict(event))
        maybe_fail("on_resize")

    @trainer.on_preempt
    def preempted(event: Any) -> None:
        tell(trainer, "on_preempt", **asdict(event))
        maybe_fail("on_preempt")
        torch.save(model.state_dict(), trainer.disk / "mine.pt")
        time.sleep(takes_s)
        deadline_s = time.monotonic() + PATIENCE_S
        while (
            awaits_world
            and not sign_of(trainer, awaits_world).exists()
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.005)
        tell(trainer, "said goodbye", others_went_on=sign_of(trainer, awaits_world).exists())

    @trainer.on_fault
    def lost(event: Any) -> None:
        fields = asdict(event)
        tell(trainer, "on_fault", lost=fields.pop("rank"), **fields)


def train(
    trainer: Any,
    *,
    steps: int = 40,
    fails: str = "",
    takes_s: float = 0.0,
    awaits_world: int = 0,
    step_s: float = 0.0,
    leaves: bool = False,
    last_saves_s: float = 0.0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a replicated model.

    Args:
        fails: see :func:`name_hooks`; so are ``takes_s`` and ``awaits_world``.
        step_s: least time of a shard.
        leaves: save and return when the world is about to change.
        last_saves_s: time that the last rank takes to save then.
        until: the goal of an open-ended run; see :class:`chaoskit.fixtures.jobs.goal.Goal`.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Linear(4, 4)
    name_hooks(trainer, model, fails, takes_s, awaits_world)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    goal = Goal(trainer, steps, until)
    try:
        while goal.is_ahead():
            with trainer.transaction() as step:
                goal.pace()
                for shard in step.shards(DATA, batch_size=8):
                    time.sleep(step_s)
                    step.backward(model(shard.batch).square().mean())
            sign_of(trainer, trainer.world).touch()
            tell(trainer, "step", world=trainer.world, elastic=trainer.elastic_event_detected())
            if leaves and trainer.elastic_event_detected():
                time.sleep(last_saves_s if trainer.rank == trainer.world - 1 else 0.0)
                torch.save(model.state_dict(), Path(trainer.disk) / "left.pt")
                return
    finally:
        tell(trainer, "left the function")


def train_sharded(
    trainer: Any,
    *,
    steps: int = 40,
    fails: str = "",
    takes_s: float = 0.0,
    step_s: float = 0.0,
    until: dict[str, Any] | None = None,
) -> None:
    """Train a sharded model, entered again after each change of the world."""
    mesh = trainer.mesh()
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
    fully_shard(model, mesh=mesh)
    name_hooks(trainer, model[1], fails, takes_s)
    trainer.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    goal = Goal(trainer, steps, until)
    while goal.is_ahead():
        with trainer.transaction() as step:
            goal.pace()
            for shard in step.shards(DATA, batch_size=8):
                time.sleep(step_s)
                step.backward(model(shard.batch).square().mean())
        tell(trainer, "step", world=trainer.world, elastic=trainer.elastic_event_detected())
