"""Storage plug-ins that give the checkpoints of ``torch.distributed.checkpoint`` our guarantees.

A script keeps its calls:

    writer = SnapshotWriter(DiskTier("checkpoints", retention=Retention(keep_last=3)))
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    dcp.load(state, storage_reader=SnapshotReader("checkpoints"))  # or a URL
    restored = restore(state, memory="/dev/shm/job", disk="checkpoints", remote="s3://bucket/run")

The coordinator, which is rank 0, begins a snapshot. Each rank writes its file, and the coordinator
commits. A rank that fails makes the whole save fail.

-> ``daemon/saving.py``: saves of a job that chaoskit launches; a save that fails costs no step.
-> ``runtime/state/from_store.py``: restores in such a job.
-> ``remote/uploader.py``: uploads, which ``committed`` of the writer may start.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from chaoskit.checkpoint.disk.dcp_metadata import build_metadata, index_of, items_by_index
from chaoskit.checkpoint.disk.inventory import DamagedSnapshot, NothingToRestore
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.parts import PartWriter
from chaoskit.checkpoint.disk.snapshot import Snapshot, TensorRequest
from chaoskit.checkpoint.disk.staging import Staging
from chaoskit.checkpoint.disk.tier import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.layout.boxes import Box, whole
from chaoskit.checkpoint.layout.manifest import Damaged, FileEntry, Item, Part
from chaoskit.checkpoint.remote.tier import RemoteSnapshot, RemoteTier, checked_manifest
from chaoskit.checkpoint.step_names import CheckpointId, names_step, step_of
from chaoskit.errors import BadInput, ChaoskitError
from chaoskit.process.linux import reason_of
from chaoskit.typed import convert, typed_arguments

_log = logging.getLogger("chaoskit.checkpoint")
#: A tier, or the directory or URL of one.
Place = DiskTier | RemoteTier | str | Path
_Value = TypeVar("_Value")
#: The number of paths, and the length of a value, that an error shows.
_SHOWN_PATHS = 5
_SHOWN_CHARS = 60


class SaveFailed(ChaoskitError):
    """A snapshot was not stored. Those before it are untouched, and nothing partial is left.

    If only the last sync of its commit failed, it is stored all the same.

    Attributes:
        step: step of the state; -1 if the save failed before its ``step_key`` was read.
        tier: directory of the tier.
        reason: the cause of the failure.
    """

    def __init__(self, step: int, tier: str, reason: str) -> None:
        self.step, self.tier, self.reason = step, tier, reason
        state = f"step {step}" if step >= 0 else "a state"
        super().__init__(f"{state} was not saved to {tier}: {reason}")

    def __reduce__(self) -> tuple[type[SaveFailed], tuple[int, str, str]]:
        return type(self), (self.step, self.tier, self.reason)  # torch pickles what a rank raises


class Restored(NamedTuple):
    """The snapshot that :func:`restore` loaded.

    Args:
        step: step of the snapshot.
        path: its directory or URL.
        lost: damaged snapshots that are as new or newer. They are in quarantine now.
    """

    step: int
    path: str
    lost: list[DamagedSnapshot]


class _Assignment(NamedTuple):
    """The coordinator's order to a rank. ``staging`` is the name of a staging directory, or ""."""

    rank: int
    staging: str


class _WrittenItem(NamedTuple):
    """A rank's report of an item that it has written, and of the file with the item."""

    entry: FileEntry
    item: Item


class _NotWritten(NamedTuple):
    """A rank's report that it could not write its items."""

    reason: str


class _StepRead(NamedTuple):
    """The value of ``step_key``, as read by the rank that writes it.

    ``step`` is None if the value is not a step. ``shown`` is the value as text for an error
    message, which may be cut off.
    """

    step: int | None
    shown: str


class SnapshotWriter(StorageWriter):
    """A storage writer that keeps the states of ``dcp.save`` and ``dcp.async_save`` in a directory.

    The step of a save is the value of ``step_key`` in its state, or :attr:`step`, or else the step
    in its ``checkpoint_id`` (see :func:`~chaoskit.checkpoint.step_names.step_of`). Retention and
    restore go by this step, never by another number.

    Args:
        tier: a directory that all ranks share, on a disk or in shared memory, or its path.
        on_failure: ``raise`` lets ``dcp.save`` raise; ``report`` logs the failure, keeps it in
            :attr:`failures` and lets training go on.
        committed: called by the coordinator with each committed snapshot: the place to start an
            upload.
        step_key: path of an integer in the state, such as ``loop.step``, that holds the step.

    Attributes:
        failures: failures of the last save; only rank 0 has them.
        step: step of later saves; None if their names contain it. A thread of ``dcp.async_save``
            reads it late: there use ``step_key`` or names. Setting it raises BadInput if there is a
            ``step_key``, or the value is not one whole number, 0 or more.

    Raises:
        BadInput: if ``tier`` is a URL, or an argument is of another type.
    """

    @typed_arguments
    def __init__(
        self,
        tier: DiskTier | str | Path,
        *,
        on_failure: Literal["raise", "report"] = "raise",
        committed: Callable[[Snapshot], None] | None = None,
        step_key: str = "",
    ) -> None:
        if isinstance(tier, str) and "://" in tier:
            raise BadInput(
                "tier", tier, "write to a directory, and upload from there: committed=, Uploader"
            )
        self.tier = tier if isinstance(tier, DiskTier) else DiskTier(tier)
        self.on_failure, self.committed = on_failure, committed
        self.step_key = step_key
        self.failures: list[SaveFailed] = []
        self._explicit_step: int | None = None  # the value of ``step``
        self._named_step: int | None = None  # step in the name of the next save
        self._step: int | None = None  # step of the save under way; None until its state is read
        self._staging: Staging | None = None
        self._world = 1

    @property
    def step(self) -> int | None:
        return self._explicit_step

    @step.setter
    def step(self, step: int | None) -> None:
        if self.step_key and step is not None:
            raise BadInput("step", step, f"leave it out: step_key={self.step_key!r} names the step")
        if step is not None and _as_step(step) is None:
            raise BadInput("step", step, "give one whole number, 0 or more")
        self._explicit_step = step

    # -- called by torch, in this order ------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take the name of the next save. torch does not call this for a save without a name.

        Raise BadInput if the step is to come from the name, and the name has none.
        """
        has_step = bool(self.step_key) or self._explicit_step is not None
        self._named_step = None if checkpoint_id is None or has_step else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Choose the step of the save; with ``step_key`` it stays open until the state is read.

        Raise BadInput if no step is named, or if torch is to write without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise BadInput(
                "use_collectives",
                False,
                "leave it True: rank 0 commits what all ranks have written",
            )
        self._step = self._named_step if self._explicit_step is None else self._explicit_step
        self._named_step = None
        if self._step is None and not self.step_key:
            raise BadInput(
                "checkpoint_id",
                None,
                "name the step, such as checkpoint_id='step-120', or give step_key=",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the step that this rank names, which torch sends to rank 0.

        The step is None if it comes from ``step_key``.
        """
        return dataclasses.replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin a snapshot, and return the plans, each with the name of the staging directory.

        The leftovers of a save that ended early are removed, and :attr:`failures` is emptied. If
        the disk fails, the failure is recorded and the name is "".

        Raises:
            BadInput: if plans are cached, steps differ, or the state has no item ``step_key``.
        """
        # the planner would reuse an old plan with an old directory
        if not all(plan.usable for plan in plans):
            raise BadInput(
                "enable_plan_caching",
                True,
                "leave it False: each snapshot has a directory of its own",
            )
        if self._staging is not None:  # left by a save that ended early, as when a rank is lost
            self._staging.abandon()
        self._staging, self._world, self.failures = None, len(plans), []
        self._require_one_step(plans)
        try:
            self._staging = self.tier.begin(self._step or 0)
        except OSError as error:
            self._record_failure(str(error))
        name = self._staging.name if self._staging is not None else ""
        return [
            dataclasses.replace(plan, storage_data=_Assignment(rank, name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank, and return a completed future with a result for each.

        A failure is reported in the results, which torch gathers on rank 0. If the snapshot could
        not be begun, nothing is written and there are no results.
        """
        assignment: _Assignment = plan.storage_data
        results: list[WriteResult] = []
        if assignment.staging:
            try:
                results += [
                    WriteResult(item.index, 0, _read_step(item, planner))
                    for item in plan.items
                    if item.index.fqn == self.step_key
                ]
                results += _write(
                    plan.items, planner, self.tier.join(assignment.staging), assignment.rank
                )
            except Exception as error:  # noqa: BLE001 -- the coordinator reports the error
                reason = f"rank {assignment.rank}: {reason_of(error)}"
                results.append(WriteResult(MetadataIndex(""), 0, _NotWritten(reason)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the snapshot if all ranks have written; otherwise remove what was written.

        A failure of a rank or of the commit is logged and added to :attr:`failures`. Fields of
        ``metadata`` that torch expects to be set are set here.

        Raises:
            SaveFailed: the first failure, if ``on_failure`` is ``raise``.
            BadInput: if the value of ``step_key`` is not one step, the same on all ranks.
            Exception: any error of ``committed``. The snapshot is stored all the same.
        """
        reports = [result.storage_data for rank_results in results for result in rank_results]
        staging, self._staging = self._staging, None
        if staging is not None:
            with staging:
                self._take_step([report for report in reports if isinstance(report, _StepRead)])
                if reasons := [
                    report.reason for report in reports if isinstance(report, _NotWritten)
                ]:
                    self._record_failure("; ".join(reasons))
                else:
                    self._commit(
                        staging,
                        [report for report in reports if isinstance(report, _WrittenItem)],
                        metadata,
                    )
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        if self.failures and self.on_failure == "raise":
            raise self.failures[0]

    def storage_meta(self) -> StorageMeta | None:
        """Return torch's description of the save, with the tier's directory and the step."""
        return StorageMeta(checkpoint_id=str(self.tier.root), save_id=str(self._step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return True if a save under this name has a step. torch calls this."""
        return names_step(checkpoint_id)

    # -- called on the coordinator -----------------------------------------------------------------

    def _require_one_step(self, plans: list[SavePlan]) -> None:
        """Raise BadInput if ranks name different steps, or the state has no item ``step_key``."""
        steps = {plan.storage_data for plan in plans if isinstance(plan.storage_data, int)}
        if len(steps) > 1:
            raise BadInput("checkpoint_id", sorted(steps), "name the same step on all ranks")
        paths = {item.index.fqn for plan in plans for item in plan.items}
        if self.step_key and self.step_key not in paths:
            similar_paths = sorted(
                path for path in paths if "step" in path.rpartition(".")[2]
            ) or sorted(paths)
            shown = ", ".join(similar_paths[:_SHOWN_PATHS]) or "nothing"
            raise BadInput(
                "step_key", self.step_key, f"name an integer of the state, which has {shown}"
            )

    def _take_step(self, readings: list[_StepRead]) -> None:
        """Set the step from ``step_key``. Does nothing if no rank has read it.

        Raises:
            BadInput: if its value is not a step, or differs among ranks.
        """
        if not readings:
            return
        if len(readings) != readings.count(readings[0]) or readings[0].step is None:
            values = " and ".join(sorted({reading.shown for reading in readings}))
            raise BadInput(
                "step_key", self.step_key, f"name one whole number, 0 or more, not {values}"
            )
        self._step = readings[0].step

    def _commit(self, staging: Staging, written: list[_WrittenItem], metadata: Metadata) -> None:
        """Commit the snapshot, delete old ones, and call ``committed`` with the snapshot.

        The staging directory gets the step of ``step_key`` before. A disk that fails before the
        commit is recorded as a failure; later, it is only logged. A newer snapshot in the tier is
        logged, too.
        """
        entries = {report.entry.name: report.entry for report in written}
        part = Part(tuple(entries.values()), tuple(report.item for report in written))
        keys = {
            path: tuple(place)
            for path, place in (metadata.planner_data or {}).items()
            if place != (path,)
        }
        assert self._step is not None
        if self.step_key:  # the step was not known when the snapshot was begun
            staging.step, staging.generation = self._step, self.tier.free_generation(self._step)
        try:
            snapshot = staging.commit([part], world=self._world, keys=keys)
        except OSError as error:
            self._record_failure(str(error))
            return
        self._warn_of_newer(snapshot)
        try:
            self.tier.prune()
        except OSError as error:  # the snapshot is stored all the same
            _log.warning("old snapshots below %s were not deleted: %s", self.tier.root, error)
        if self.committed is not None:
            self.committed(snapshot)

    def _warn_of_newer(self, snapshot: Snapshot) -> None:
        """Log a warning if a restore would load a newer snapshot than the one just stored."""
        newest = self.tier.newest_step()
        if newest > snapshot.manifest.step:
            text = "step %s was saved, but a restore would load the newer step %s: move that snapshot away, or load it"
            _log.warning(text, snapshot.manifest.step, newest)

    def _record_failure(self, reason: str) -> None:
        """Log a failure of the save and add it to :attr:`failures`."""
        failure = SaveFailed(-1 if self._step is None else self._step, str(self.tier.root), reason)
        _log.warning("%s", failure)
        self.failures.append(failure)


def _as_step(value: object) -> int | None:
    """Return ``value`` as a step, or None if it is not one whole number, 0 or more."""
    if isinstance(value, torch.Tensor):
        is_whole = not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
        value = value.item() if is_whole and value.numel() == 1 else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return int(value)


def _read_step(item: WriteItem, planner: SavePlanner) -> _StepRead:
    """Return the value of ``step_key``, which is read from an item."""
    value: object = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        value = torch.load(io.BytesIO(value.getbuffer()), weights_only=True)
    return _StepRead(_as_step(value), " ".join(repr(value).split())[:_SHOWN_CHARS])


def _write(
    items: list[WriteItem], planner: SavePlanner, staging: Staging, rank: int
) -> list[WriteResult]:
    """Write a rank's file, if the rank has any items, and return a result for each item."""
    if not items:
        return []
    with staging.writer(f"__{rank}_0{DATA_SUFFIX}") as writer:
        stored = [_add(writer, item, planner) for item in items]
        (entry,) = writer.finish().files
    return [
        WriteResult(index_of(item), item.size_bytes, _WrittenItem(entry, item)) for item in stored
    ]


def _add(writer: PartWriter, item: WriteItem, planner: SavePlanner) -> Item:
    """Add the data of one item to the rank's file, and return the stored item."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        return writer.add_object(item.index.fqn, data.getbuffer())
    assert item.tensor_data is not None
    start = tuple(item.tensor_data.chunk.offsets)
    return writer.add_tensor(item.index.fqn, data, shape=tuple(item.tensor_data.size), start=start)


class SnapshotReader(StorageReader):
    """A storage reader that loads a snapshot with ``dcp.load`` straight into the state's tensors.

    The bytes are verified as they are read. Each rank reads only what it needs. A ``checkpoint_id``
    of ``dcp.load`` selects another step, or one snapshot, for that load.

    Args:
        place: a tier, or the directory or URL of snapshots or of one of them.
        step: step to load; None for the newest whose manifest can be read.

    Attributes:
        snapshot: the snapshot that the last load has chosen; None before the first load.

    Raises:
        BadInput: if ``place`` is an invalid URL, or a package that it needs is not installed.
    """

    @typed_arguments
    def __init__(self, place: Place, step: int | None = None) -> None:
        self.step = step
        self.snapshot: Snapshot | None = None
        self._name = ""  # name of the only snapshot to read; "" for any
        self._requested_name = ""  # name of the snapshot for the next load; "" for any
        self._requested_step: int | None = None
        if isinstance(place, str | Path):
            root, slash, name = str(place).rpartition("/")
            if parse_name(name) is not None:
                place, self._name = root or slash or ".", name
        self.tier = _as_tier(place)

    @classmethod
    def of(cls, tier: DiskTier | RemoteTier, name: str) -> SnapshotReader:
        """Return a reader of the snapshot with this name."""
        reader = cls(tier)
        reader._name = name
        return reader

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The address of the snapshots, for torch's log."""
        return _address(self.tier, self._name)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take the name of the next load. torch does not call this for a load without a name.

        Raise BadInput if the name has no step, or not that of the reader's only snapshot.
        """
        self._requested_name, self._requested_step = "", None
        if checkpoint_id is None:
            return
        self._requested_step = step_of(checkpoint_id)
        name = Path(checkpoint_id).name
        self._requested_name = name if parse_name(name) is not None else ""
        if self._name and (parse_name(self._name) or (0,))[0] != self._requested_step:
            raise BadInput(
                "checkpoint_id",
                str(checkpoint_id),
                f"leave it out: the reader's place is {self._name}",
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Set :attr:`snapshot` to the snapshot to load, and return its metadata.

        Raises:
            BadInput: if there is no such snapshot.
            Damaged: if the only snapshot that may be loaded has a damaged or missing manifest.
            RemoteRefused, RemoteUnavailable: if a remote tier refuses or does not answer.
            OSError: if a manifest on disk cannot be read for another reason.
        """
        self.snapshot = self._choose()
        metadata = build_metadata(self.snapshot.manifest)
        address = _address(self.tier, self.snapshot.name)
        metadata.storage_meta = StorageMeta(checkpoint_id=address, load_id=str(uuid.uuid4()))
        return metadata

    def _choose(self) -> Snapshot:
        """Return the snapshot to load; see :meth:`read_metadata` for errors.

        A damaged snapshot is skipped with a warning, unless it was named.
        """
        step = self.step if self._requested_step is None else self._requested_step
        if name := self._name or self._requested_name:
            if isinstance(self.tier, RemoteTier):
                return self.tier.open(name)
            # a directory of another host is missing here, but its snapshot is not damaged
            if not self.tier.root.is_dir():
                raise BadInput("place", str(self.tier.root), "use a directory that all ranks see")
            return Snapshot.open(self.tier.root / name)
        for snapshot in _snapshots(self.tier):
            if isinstance(snapshot, DamagedSnapshot):
                _log.warning(
                    "%s is damaged and skipped: %s",
                    _address(self.tier, snapshot.name),
                    snapshot.reason,
                )
            elif step in (None, snapshot.manifest.step):
                return snapshot
        description = "a snapshot" if step is None else f"a snapshot of step {step}"
        raise BadInput("place", _address(self.tier), f"give a directory or URL with {description}")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: :meth:`read_metadata` has chosen the snapshot already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify all requested parts, and hand them to the planner.

        The name that was given for this load is forgotten. Return a completed future.

        Raises:
            Damaged: if data was changed.
            OSError: if a file on disk cannot be read for another reason.
            RemoteRefused, RemoteUnavailable: if a remote tier refuses or does not answer.
        """
        assert self.snapshot is not None
        stored = items_by_index(self.snapshot.manifest)
        tensor_requests = []
        for request in plan.items:
            item = stored[request.storage_index]
            if request.type == LoadItemType.BYTE_IO:
                part = whole((item.size_bytes,))
                tensor_requests.append(
                    TensorRequest(item, part, torch.empty(item.size_bytes, dtype=torch.uint8))
                )
            else:
                start = tuple(map(sum, zip(item.start, request.storage_offsets, strict=True)))
                part = Box(start, tuple(request.lengths))
                tensor_requests.append(
                    TensorRequest(item, part, planner.resolve_tensor(request).detach())
                )
        self.snapshot.read(tensor_requests)
        for request, tensor_request in zip(plan.items, tensor_requests, strict=True):
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(tensor_request.target.numpy().tobytes()))
            else:
                planner.commit_tensor(request, tensor_request.target)
        self._requested_name, self._requested_step = "", None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return True if the name has a step. torch calls this."""
        return names_step(checkpoint_id)


def restore(
    state_dict: dict[str, Any],
    *,
    memory: DiskTier | str | Path | None = None,
    disk: DiskTier | str | Path | None = None,
    remote: RemoteTier | str | None = None,
) -> Restored | None:
    """Load the newest complete snapshot of the given places, on all ranks.

    All ranks call this with the same places. The bytes are verified as they are read. A damaged
    snapshot is quarantined, and the newest of the remaining ones is tried. Of equally new snapshots
    the nearest is loaded.

    Args:
        state_dict: the state to fill in place, as by ``dcp.load``.
        memory: a directory in shared memory, such as one below ``/dev/shm``; None for none.
        disk: a directory; None for none.
        remote: a URL, or a tier with its credentials; None for none.

    Returns:
        The snapshot that was loaded, or None if there is no snapshot.

    Raises:
        NothingToRestore: if all snapshots are damaged. The state dict holds garbage then.
        BadInput: if no place is given, or the URL is invalid.
        RemoteRefused, RemoteUnavailable: if the store refuses or does not answer, since it may hold
            the newest snapshot.
        OSError: if a manifest on disk cannot be read, or a damaged snapshot cannot be moved.
        CheckpointException: if a rank cannot load the snapshot for another reason than damage.
    """
    memory = convert("memory", memory, DiskTier | str | Path | None)
    disk = convert("disk", disk, DiskTier | str | Path | None)
    remote = convert("remote", remote, RemoteTier | str | None)
    tiers = [_as_tier(place) for place in (memory, disk, remote) if place is not None]
    if not tiers:
        raise BadInput("disk", None, "name a place: memory, disk or remote")
    try:
        return _restore(state_dict, tiers)
    finally:
        if isinstance(remote, str) and isinstance(tiers[-1], RemoteTier):
            tiers[-1].close()


def _restore(state_dict: dict[str, Any], tiers: Sequence[DiskTier | RemoteTier]) -> Restored | None:
    """Try snapshots, the newest first, until all ranks have loaded one, and return that one.

    Return None if no tier has a snapshot. Raise NothingToRestore if all are damaged.
    """
    lost: list[DamagedSnapshot] = []  # filled on the coordinator
    while True:
        offered, damaged = _from_coordinator(partial(_newest_offer, tiers, lost))
        if offered is None:
            if damaged:
                raise NothingToRestore(", ".join(map(_address, tiers)), damaged)
            return None
        tier, (step, _) = tiers[offered.tier], offered.age
        try:
            load(state_dict, storage_reader=SnapshotReader.of(tier, offered.name))
        except CheckpointException as error:
            if (damage := _damage_in(error.failures)) is None:
                raise
            if _is_coordinator():
                lost.append(_quarantine(tier, offered.name, damage))
            continue
        return Restored(
            step,
            _address(tier, offered.name),
            [snapshot for snapshot in damaged if snapshot.step >= step],
        )


class _Offered(NamedTuple):
    """The next snapshot to try.

    Attributes:
        age: step and generation.
        tier: index of its tier.
        name: its name in the tier.
    """

    age: tuple[int, int]
    tier: int
    name: str


def _newest_offer(
    tiers: Sequence[DiskTier | RemoteTier], lost: list[DamagedSnapshot]
) -> tuple[_Offered | None, list[DamagedSnapshot]]:
    """Return the newest snapshot with a readable manifest, and ``lost``.

    Newer snapshots whose manifest is damaged are quarantined and added to ``lost``.
    """
    newest: _Offered | None = None
    for tier_index, tier in enumerate(tiers):
        for snapshot in _snapshots(tier):
            if isinstance(snapshot, DamagedSnapshot):
                lost.append(_quarantine(tier, snapshot.name, snapshot.reason))
                continue
            if newest is None or snapshot.manifest.age > newest.age:
                newest = _Offered(snapshot.manifest.age, tier_index, snapshot.name)
            break
    return newest, lost


def _snapshots(tier: DiskTier | RemoteTier) -> Iterator[Snapshot | DamagedSnapshot]:
    """Yield the snapshots of a tier, the newest first. Manifests are read, data files are not."""
    if isinstance(tier, DiskTier):
        listing = tier.snapshots()
        snapshots: list[Snapshot | DamagedSnapshot] = [*listing.snapshots, *listing.damaged]
        yield from sorted(
            snapshots, key=lambda snapshot: parse_name(snapshot.name) or (-1, -1), reverse=True
        )
        return
    for name, data in tier.candidates():
        try:
            yield RemoteSnapshot(Path(name), checked_manifest(name, data), tier.store)
        except Damaged as error:
            yield DamagedSnapshot(name, Path(name), str(error))


def _quarantine(tier: DiskTier | RemoteTier, name: str, reason: str) -> DamagedSnapshot:
    """Quarantine a damaged snapshot of a tier, and return its description.

    A remote store that cannot be written keeps it as it is, which is logged.
    """
    if isinstance(tier, DiskTier):
        return tier.quarantine(tier.root / name, reason)
    return tier.set_aside(name, reason)


def _as_tier(place: Place) -> DiskTier | RemoteTier:
    """Return ``place`` as a tier, which is opened if ``place`` is a directory or URL."""
    if isinstance(place, DiskTier | RemoteTier):
        return place
    return RemoteTier(str(place)) if isinstance(place, str) and "://" in place else DiskTier(place)


def _address(tier: DiskTier | RemoteTier, name: str = "") -> str:
    """Return the path or URL of a tier, or of a snapshot in it."""
    root = str(tier.root) if isinstance(tier, DiskTier) else tier.store.url
    return f"{root}/{name}" if name else root


def _damage_in(failures: Mapping[int, Any]) -> str | None:
    """Return the damage of the snapshot, or None if all ranks failed for other reasons."""
    for failure in failures.values():
        error = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(error, Damaged):
            return str(error)
    return None


def _is_coordinator() -> bool:
    """Return True on rank 0, and in a process without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_coordinator(produce: Callable[[], _Value]) -> _Value:
    """Return the coordinator's value of ``produce`` on every rank, or raise its error there."""
    if not dist.is_initialized():
        return produce()
    shared: list[Any] = [None, None]
    if _is_coordinator():
        try:
            shared[0] = produce()
        except (ChaoskitError, OSError) as error:
            shared[1] = error
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise shared[1]
    value: _Value = shared[0]
    return value
