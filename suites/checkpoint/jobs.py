"""Jobs that wait until their state is stored or copied, so that no number of steps has to be long enough for it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from chaoskit.checkpoint import DiskTier
from chaoskit.checkpoint.disk.names import STAGING, snapshot_name
from chaoskit.journal import read_journals

_DATA = torch.rand(480, 8, generator=torch.Generator().manual_seed(5))


def stored(
    trainer: Any, *, steps: int, step_s: float = 0.02, until: dict[str, Any] | None = None
) -> None:
    """Train; at one step until a fault of the disk has ended, at a later one until a snapshot of it is whole.

    In between it waits before each save until the one before is over: a node lets a save go while it writes another.

    Args:
        until: ``healed_at``, ``stored_at``: these steps; ``every_steps``: from save to save; ``directory``: of the disk
            tier. Or ``snapshots``: see :func:`_wait_for_snapshots`. None, as of the unbroken run, which has no disk
            tier: the job never waits.
    """
    torch.manual_seed(trainer.seed)
    model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Dropout(0.1), nn.Linear(512, 1))
    trainer.register(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), clip_norm=0.5
    )
    while trainer.step < steps:
        if until is not None and "snapshots" in until:
            _wait_for_snapshots(trainer, until)
        elif until is not None:
            _wait(trainer, until)
        with trainer.transaction() as step:
            time.sleep(step_s)
            for shard in step.shards(_DATA, batch_size=48):
                step.backward(
                    (model(shard.batch) - shard.batch.sum(1, keepdim=True).sin()).square().mean()
                )


def _wait(trainer: Any, until: dict[str, Any]) -> None:
    while trainer.step == until["healed_at"] and not _is_healed(trainer):
        time.sleep(0.02)
    if (
        until["healed_at"] < trainer.step < until["stored_at"]
        and (trainer.step + 1) % until["every_steps"] == 0
    ):
        last = trainer.step + 1 - until["every_steps"]
        while not _is_over(trainer, Path(until["directory"]), last):
            time.sleep(0.02)
    while trainer.step == until["stored_at"] and not _is_stored(
        Path(until["directory"]), trainer.step
    ):
        time.sleep(0.02)


def copied(
    trainer: Any, *, steps: int, replicas: int = 1, until: dict[str, Any] | None = None
) -> None:
    """Train a sharded model; at one step until the state of every rank has all its copies.

    Args:
        replicas: groups of ranks that hold the whole state together; more than one for HSDP.
        until: ``copied_at``: the step. Or ``snapshots``: see :func:`_wait_for_snapshots`. None, as of the unbroken run:
            the job does not wait.
    """
    mesh = trainer.mesh(replicate=replicas, shard=-1) if replicas > 1 else trainer.mesh()
    torch.manual_seed(trainer.seed)
    with torch.device("meta") if trainer.will_restore else nullcontext():
        model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1))
    fully_shard(model, mesh=mesh)
    if trainer.will_restore:
        model.to_empty(device=trainer.device)
    trainer.register(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
    while trainer.step < steps:
        if until is not None and "snapshots" in until:
            _wait_for_snapshots(trainer, until)
        elif until is not None and trainer.step == until["copied_at"]:
            _wait_for_copies(trainer)
        with trainer.transaction() as step:
            for shard in step.shards(_DATA, batch_size=48):
                step.backward(
                    (model(shard.batch) - shard.batch.sum(1, keepdim=True).sin()).square().mean()
                )


def _wait_for_copies(trainer: Any) -> None:
    """Once for each rank: a process that takes its place later has no copies of this step, and need not have."""
    marks = Path(trainer.disk).parent / "copied"
    marks.mkdir(exist_ok=True)
    mine = marks / str(trainer.rank)
    while not mine.exists() and trainer._worker.board.protected < trainer.step:
        time.sleep(0.005)
    mine.touch()
    while not all((marks / str(rank)).exists() for rank in range(trainer.world)):
        time.sleep(0.005)


def _wait_for_snapshots(trainer: Any, until: dict[str, Any]) -> None:
    """Before a step of ``until["snapshots"]``, until whole snapshots of its steps are in the directory."""
    wanted = until["snapshots"].get(str(trainer.step), [])
    while not all(_is_stored(Path(until["directory"]), step) for step in wanted):
        time.sleep(0.02)


def _is_healed(trainer: Any) -> bool:
    journals = Path(trainer.disk).parent.parent / "journal"
    return any(record.event == "lifted" for record in read_journals(journals))


def _is_over(trainer: Any, directory: Path, step: int) -> bool:
    """Whether the save of ``step`` was made or has failed, and no node writes it any more."""
    journals = Path(trainer.disk).parent.parent / "journal"
    told = any(
        record.event in ("saved", "save_failed") and record["step"] == step
        for record in read_journals(journals)
    )
    name = snapshot_name(step, generation=0).partition(".")[0]
    return told and not any((directory / STAGING).glob(f"{name}.*"))


def _is_stored(directory: Path, step: int) -> bool:
    return any(
        snapshot.manifest.step == step for snapshot in DiskTier(directory).snapshots().snapshots
    )
