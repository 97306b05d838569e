"""Plug-ins for ``torch.distributed.checkpoint``: a script keeps its calls, and its checkpoints get our guarantees.

    writer = SnapshotWriter(DiskTier("checkpoints", retention=Retention(keep_last=3)))
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    dcp.load(state, storage_reader=SnapshotReader("checkpoints"))

The coordinator's tiers say what is due and where it goes, each rank writes its file, the coordinator commits. Several
tiers take the same save, each by its own schedule: a directory in memory at every step, one on disk now and then.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from chaoskit.checkpoint.dcp_metadata import build_metadata, index_of, indexed
from chaoskit.checkpoint.disk import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.layout import Box, whole
from chaoskit.checkpoint.manifest import FileEntry, Item, Part
from chaoskit.checkpoint.names import parse_name
from chaoskit.checkpoint.parts import PartWriter
from chaoskit.checkpoint.snapshot import Snapshot, Wanted
from chaoskit.checkpoint.staging import Staging
from chaoskit.errors import BadInput, ChaoskitError

_log = logging.getLogger("chaoskit.checkpoint")
CheckpointId = str | os.PathLike[str]


class SaveFailed(ChaoskitError):
    """A tier did not take a snapshot. What it had before is untouched, and nothing partial is left."""

    def __init__(self, step: int, tier: str, reason: str) -> None:
        self.step, self.tier, self.reason = step, tier, reason
        super().__init__(f"step {step} was not saved to {tier}: {reason}")

    def __reduce__(self) -> tuple[type[SaveFailed], tuple[int, str, str]]:
        return type(self), (self.step, self.tier, self.reason)  # torch sends what a rank raises to the others


class _Assignment(NamedTuple):
    """What the coordinator tells a rank: the number of each tier that is due, and the name of its staging directory."""

    rank: int
    stagings: tuple[tuple[int, str], ...]


class _Written(NamedTuple):
    """What a rank tells the coordinator of an item."""

    tier: int
    entry: FileEntry
    item: Item


class _NotWritten(NamedTuple):
    tier: int
    reason: str


def step_of(checkpoint_id: CheckpointId) -> int:
    """The step that a checkpoint is named after: the last number in the last part of its path.

    Raises:
        BadInput: if there is none.
    """
    name = Path(os.fspath(checkpoint_id)).name
    if (age := parse_name(name)) is not None:
        return age[0]
    numbers = re.findall(r"\d+", name)
    if not numbers:
        raise BadInput("checkpoint_id", checkpoint_id, "end it with the number of the step, such as step-120")
    return int(numbers[-1])


class SnapshotWriter(StorageWriter):
    """Stores what ``dcp.save`` and ``dcp.async_save`` are given, in every tier that is due.

    Args:
        tiers: directories that all ranks share, or paths of such. A save that no tier finds due writes nothing.
        on_failure: ``raise`` lets ``dcp.save`` raise after the other tiers have taken the snapshot; ``report`` logs the
            failure, keeps it in :attr:`failures` and lets training go on.
        committed: called by the coordinator with each snapshot that counts: the place to start an upload.
    """

    def __init__(
        self,
        *tiers: DiskTier | str | Path,
        on_failure: Literal["raise", "report"] = "raise",
        committed: Callable[[Snapshot], None] | None = None,
    ) -> None:
        if not tiers:
            raise BadInput("tiers", tiers, "name a directory")
        self.tiers = [tier if isinstance(tier, DiskTier) else DiskTier(tier) for tier in tiers]
        self.on_failure, self.committed = on_failure, committed
        self.failures: list[SaveFailed] = []
        self._step: int | None = None
        self._demanded: int | None = None
        self._stagings: dict[int, Staging] = {}
        self._world = 1

    def due(self, step: int) -> bool:
        """Whether any tier wants a snapshot of ``step``."""
        return any(tier.due(step, demanded=step == self._demanded) for tier in self.tiers)

    def demand(self, step: int) -> None:
        """Have every tier take the snapshot of ``step``, whatever its schedule says: the last one of a job."""
        self._demanded = step

    # -- called by torch, in this order ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise BadInput("use_collectives", False, "leave it True: one process commits what all have written")
        if self._step is None:
            raise BadInput("checkpoint_id", None, "name the step, such as checkpoint_id='step-120'")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(plan.usable for plan in plans):  # the planner puts an old plan in their place, and an old directory
            raise BadInput("enable_plan_caching", True, "leave it False: each snapshot has a directory of its own")
        for staging in self._stagings.values():  # of a save that ended without a word, as when a rank is lost
            staging.abandon()
        self._stagings, self._world, self.failures = {}, len(plans), []
        step = self._step or 0
        for number, tier in enumerate(self.tiers):
            try:
                if tier.due(step, demanded=step == self._demanded):
                    self._stagings[number] = tier.begin(step)
            except OSError as error:
                self._note(number, str(error))
        names = tuple((number, staging.name) for number, staging in self._stagings.items())
        return [dataclasses.replace(plan, storage_data=_Assignment(rank, names)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assignment: _Assignment = plan.storage_data
        results: list[WriteResult] = []
        for number, name in assignment.stagings:
            staging = self.tiers[number].join(name)
            try:
                results += _write(plan.items, planner, staging, number, assignment.rank)
            except Exception as error:  # noqa: BLE001 -- the coordinator hears of it, whatever it is
                reason = f"rank {assignment.rank}: {type(error).__name__}: {error}"
                results.append(WriteResult(MetadataIndex(""), 0, _NotWritten(number, reason)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        told = [result.storage_data for of_rank in results for result in of_rank]
        stagings, self._stagings = self._stagings, {}
        for number, staging in stagings.items():
            with staging:
                reasons = [one.reason for one in told if isinstance(one, _NotWritten) and one.tier == number]
                if reasons:
                    self._note(number, "; ".join(reasons))
                    continue
                written = [one for one in told if isinstance(one, _Written) and one.tier == number]
                self._commit(number, staging, written, metadata)
        if self.failures and self.on_failure == "raise":
            raise self.failures[0]

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.tiers[0].root), save_id=str(self._step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return bool(re.search(r"\d", Path(os.fspath(checkpoint_id)).name))

    # -- the coordinator's --------------------------------------------------------------------------------------------

    def _commit(self, number: int, staging: Staging, written: list[_Written], metadata: Metadata) -> None:
        entries = {one.entry.name: one.entry for one in written}
        part = Part(tuple(entries.values()), tuple(one.item for one in written))
        keys = {path: tuple(place) for path, place in (metadata.planner_data or {}).items() if place != (path,)}
        try:
            snapshot = staging.commit([part], world=self._world, keys=keys)
        except OSError as error:
            self._note(number, str(error))
            return
        try:
            self.tiers[number].prune()
        except OSError as error:  # the snapshot is there all the same
            _log.warning("old snapshots below %s were not deleted: %s", self.tiers[number].root, error)
        if self.committed is not None:
            self.committed(snapshot)

    def _note(self, number: int, reason: str) -> None:
        failure = SaveFailed(self._step or 0, str(self.tiers[number].root), reason)
        _log.warning("%s", failure)
        self.failures.append(failure)


def _write(items: list[WriteItem], planner: SavePlanner, staging: Staging, tier: int, rank: int) -> list[WriteResult]:
    """A rank's file, if it has anything to write."""
    if not items:
        return []
    with staging.writer(f"__{rank}_0{DATA_SUFFIX}") as writer:
        stored = [_add(writer, item, planner) for item in items]
        (entry,) = writer.finish().files
    return [WriteResult(index_of(item), item.size_bytes, _Written(tier, entry, item)) for item in stored]


def _add(writer: PartWriter, item: WriteItem, planner: SavePlanner) -> Item:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return writer.add_object(item.index.fqn, data.getbuffer())
    assert not isinstance(data, io.BytesIO)
    assert item.tensor_data is not None
    start = tuple(item.tensor_data.chunk.offsets)
    return writer.add_tensor(item.index.fqn, data, shape=tuple(item.tensor_data.size), start=start)


class SnapshotReader(StorageReader):
    """Loads a snapshot with ``dcp.load``: verified as it is read, straight into the tensors of the state dict.

    Args:
        path: a directory of snapshots, or one snapshot in it.
        step: which one; None for the newest whose manifest can be read, or for what ``checkpoint_id`` names.
    """

    def __init__(self, path: str | Path, step: int | None = None) -> None:
        self.path, self.step = Path(path), step
        self.snapshot: Snapshot | None = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """For torch's log."""
        return self.path

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.snapshot = self._choose()
        metadata = build_metadata(self.snapshot.manifest)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.snapshot.path), load_id=str(uuid.uuid4()))
        return metadata

    def _choose(self) -> Snapshot:
        if parse_name(self.path.name) is not None:
            return Snapshot.open(self.path)
        listing = DiskTier(self.path).snapshots()
        for one in listing.damaged:
            _log.warning("%s is passed over: %s", one.path, one.reason)
        for snapshot in listing.snapshots:
            if self.step in (None, snapshot.manifest.step):
                return snapshot
        wanted = "a snapshot" if self.step is None else f"one of step {self.step}"
        raise BadInput("path", str(self.path), f"name a directory that holds {wanted}")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self.snapshot is not None
        stored = indexed(self.snapshot.manifest)
        wanted = []
        for request in plan.items:
            item = stored[request.storage_index]
            if request.type == LoadItemType.BYTE_IO:
                part = whole((item.size_bytes,))
                wanted.append(Wanted(item, part, torch.empty(item.size_bytes, dtype=torch.uint8)))
            else:
                start = tuple(map(sum, zip(item.start, request.storage_offsets, strict=True)))
                part = Box(start, tuple(request.lengths))
                wanted.append(Wanted(item, part, planner.resolve_tensor(request).detach()))
        self.snapshot.read(wanted)
        for request, one in zip(plan.items, wanted, strict=True):
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(one.target.numpy().tobytes()))
            else:
                planner.commit_tensor(request, one.target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return Path(os.fspath(checkpoint_id)).is_dir()
