"""Jobs that wait until their state is stored or copied, so that no run must be long enough."""

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
    """Train, and wait for faults and snapshots of the disk at given steps.

    At one step the job waits until a fault of the disk has ended, at a later one until a snapshot
    of it is complete. In between it waits before each save until the save before is over: a node
    skips a save while it writes another.

    Args:
        until: ``healed_at``, ``stored_at``: these steps; ``every_steps``: steps between two saves;
            ``directory``: directory of the disk tier. Or ``snapshots``: see
            :func:`_wait_for_snapshots`. None for the unbroken run, which has no disk tier: the job
            never waits.
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
    """Wait at the steps of ``until`` for the end of the disk fault, or for a snapshot."""
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
    """Train a sharded model, and wait at one step until the state of every rank has all its copies.

    Args:
        replicas: groups of ranks that hold the whole state together; more than one for HSDP.
        until: ``copied_at``: the step. Or ``snapshots``: see :func:`_wait_for_snapshots`. None for
            the unbroken run: the job does not wait.
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
    """Wait until the state of every rank has all its copies, once for each rank.

    A process that takes a rank later has no copies of this step, and need not have any.
    """
    marks = Path(trainer.disk).parent / "copied"
    marks.mkdir(exist_ok=True)
    mark = marks / str(trainer.rank)
    while not mark.exists() and trainer._worker.board.protected < trainer.step:
        time.sleep(0.005)
    mark.touch()
    while not all((marks / str(rank)).exists() for rank in range(trainer.world)):
        time.sleep(0.005)


def _wait_for_snapshots(trainer: Any, until: dict[str, Any]) -> None:
    """Wait before a step of ``until["snapshots"]`` until snapshots of its steps are stored."""
    steps = until["snapshots"].get(str(trainer.step), [])
    while not all(_is_stored(Path(until["directory"]), step) for step in steps):
        time.sleep(0.02)


def _is_healed(trainer: Any) -> bool:
    """Return True if a fault of the run has ended."""
    journals = Path(trainer.disk).parent.parent / "journal"
    return any(record.event == "lifted" for record in read_journals(journals))


def _is_over(trainer: Any, directory: Path, step: int) -> bool:
    """Return True if the save of ``step`` was made or has failed, and no node writes it."""
    journals = Path(trainer.disk).parent.parent / "journal"
    is_reported = any(
        record.event in ("saved", "save_failed") and record["step"] == step
        for record in read_journals(journals)
    )
    name = snapshot_name(step, generation=0).partition(".")[0]
    return is_reported and not any((directory / STAGING).glob(f"{name}.*"))


def _is_stored(directory: Path, step: int) -> bool:
    """Return True if the directory holds a complete snapshot of a step."""
    return any(
        snapshot.manifest.step == step for snapshot in DiskTier(directory).snapshots().snapshots
    )
