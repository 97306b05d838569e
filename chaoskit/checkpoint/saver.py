"""For a training loop: saves that never raise into it, and a restore that falls through to what is whole.

    saver = Saver(SnapshotWriter(DiskTier("checkpoints", schedule=Schedule(every_steps=100))))
    resumed = restore(state, "checkpoints")
    for step in range(resumed.step if resumed else 0, steps):
        ...
        saver.save(step + 1, state)
    saver.save(steps, state, last=True)

Both are collective: every rank calls them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from chaoskit.checkpoint.dcp import SaveFailed, SnapshotReader, SnapshotWriter
from chaoskit.checkpoint.disk import DiskTier
from chaoskit.checkpoint.inventory import DamagedSnapshot, NothingToRestore
from chaoskit.checkpoint.manifest import Damaged

_Value = TypeVar("_Value")
_log = logging.getLogger("chaoskit.checkpoint")


class Restored(NamedTuple):
    """What :func:`restore` loaded. ``lost``: newer snapshots that were damaged, and are in quarantine now."""

    step: int
    path: Path
    lost: list[DamagedSnapshot]


class Saver:
    """Saves in the background, one at a time. Nothing that goes wrong with a disk is raised: see :attr:`failures`.

    Made by all ranks at the same time, since it builds process groups of its own. All ranks call :meth:`save` together.
    """

    def __init__(self, writer: SnapshotWriter) -> None:
        self._writer = writer
        self.failures: list[SaveFailed] = []
        self._pending: tuple[int, Future[Any]] | None = None
        self._saving = self._deciding = None
        if dist.is_initialized():
            self._saving, self._deciding = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")

    def save(self, step: int, state_dict: dict[str, Any], *, last: bool = False) -> bool:
        """Begin to save the state after ``step``, if a tier wants it and the save before is over. Returns whether.

        The state is copied before this returns: training may go on at once.

        Args:
            last: wait for the save before, save whatever the schedules say, and return when the snapshot is stored.
        """
        if last:
            self.close()
            self._writer.demand(step)
        self._look()
        begun = self._agreed(step) and self._begin(step, state_dict)
        if last:
            self.close()
        return begun

    def _begin(self, step: int, state_dict: dict[str, Any]) -> bool:
        try:
            found = async_save(
                state_dict,
                checkpoint_id=f"step-{step}",
                storage_writer=self._writer,
                process_group=self._saving,
            )
        except Exception as error:  # noqa: BLE001 -- a save that fails never ends training
            self._note(step, error)
            return False
        self._pending = step, found.upload_completion if isinstance(found, AsyncSaveResponse) else found
        return True

    def close(self) -> list[SaveFailed]:
        """Wait for the save that is under way; returns all failures."""
        if self._pending is not None:
            step, future = self._pending
            self._pending = None
            if (error := future.exception()) is not None:
                self._note(step, error)
            else:
                self.failures += self._writer.failures  # those that it reports and does not raise
        return self.failures

    def _look(self) -> None:
        if self._pending is not None and self._pending[1].done():
            self.close()

    def _agreed(self, step: int) -> bool:
        """Whether the coordinator wants a save, and every rank is free for it."""
        wanted = self._pending is None
        if not dist.is_initialized() or dist.get_rank() == 0:
            wanted = wanted and self._writer.due(step)
        if self._deciding is not None:
            vote = torch.tensor([int(wanted)], dtype=torch.int32)
            dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._deciding)
            wanted = bool(vote.item())
        return wanted

    def _note(self, step: int, error: BaseException) -> None:
        failure = SaveFailed(step, str(self._writer.tiers[0].root), f"{type(error).__name__}: {error}")
        _log.warning("%s", failure)
        self.failures.append(failure)


def restore(state_dict: dict[str, Any], root: str | Path) -> Restored | None:
    """Load the newest snapshot that is whole into the state dict, on all ranks. None if there is no snapshot at all.

    What is read is verified as it is read. A snapshot that fails is quarantined, and the next older one is tried.

    Raises:
        NothingToRestore: if there are snapshots, and none of them is whole. The state dict holds anything then.
    """
    tier, lost = DiskTier(root), list[DamagedSnapshot]()
    coordinator = not dist.is_initialized() or dist.get_rank() == 0
    while True:
        path = _shared(_offer(tier, lost) if coordinator else None)
        if path is None:
            lost = _shared(lost)
            if lost:
                raise NothingToRestore(Path(root), lost)
            return None
        reader = SnapshotReader(path)
        try:
            load(state_dict, storage_reader=reader)
        except CheckpointException as error:
            damage = _damage(error.failures)
            if damage is None:
                raise
            if coordinator:
                lost.append(tier.quarantine(path, damage))
            continue
        assert reader.snapshot is not None
        return Restored(reader.snapshot.manifest.step, path, _shared(lost))


def _offer(tier: DiskTier, lost: list[DamagedSnapshot]) -> Path | None:
    """The newest snapshot with a manifest that can be read."""
    listing = tier.snapshots()
    newest = listing.snapshots[0] if listing.snapshots else None
    newer = [one for one in listing.damaged if newest is None or one.step >= newest.manifest.step]
    lost += [tier.quarantine(one.path, one.reason) for one in newer]
    return newest.path if newest else None


def _damage(failures: Mapping[int, Any]) -> str | None:
    """What is wrong with the snapshot; None if a rank failed for another reason."""
    for failure in failures.values():
        error = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(error, Damaged):
            return str(error)
    return None


def _shared(value: _Value) -> _Value:
    """The coordinator's value, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
