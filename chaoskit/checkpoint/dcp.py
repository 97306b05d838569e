"""Plug-ins for ``torch.distributed.checkpoint``: a script keeps its calls, and its checkpoints get our guarantees.

    writer = SnapshotWriter(DiskTier("checkpoints", retention=Retention(keep_last=3)))
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer)
    dcp.load(state, storage_reader=SnapshotReader("checkpoints"))  # or a URL, such as s3://bucket/run
    restored = restore(state, memory="/dev/shm/job", disk="checkpoints", remote="s3://bucket/run")

The coordinator begins a snapshot, each rank writes its file, the coordinator commits.
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
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from chaoskit.checkpoint.disk.dcp_metadata import build_metadata, index_of, indexed
from chaoskit.checkpoint.disk.inventory import DamagedSnapshot, NothingToRestore
from chaoskit.checkpoint.disk.names import parse_name
from chaoskit.checkpoint.disk.parts import PartWriter
from chaoskit.checkpoint.disk.snapshot import Snapshot, Wanted
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
#: How much of the state an error shows.
_SHOWN_PATHS = 5
_SHOWN_CHARS = 60


class SaveFailed(ChaoskitError):
    """A snapshot was not stored. Those before it are untouched, and nothing partial is left.

    Attributes:
        step: of the state; -1 if the save failed before its ``step_key`` was read.
    """

    def __init__(self, step: int, tier: str, reason: str) -> None:
        self.step, self.tier, self.reason = step, tier, reason
        state = f"step {step}" if step >= 0 else "a state"
        super().__init__(f"{state} was not saved to {tier}: {reason}")

    def __reduce__(self) -> tuple[type[SaveFailed], tuple[int, str, str]]:
        return type(self), (
            self.step,
            self.tier,
            self.reason,
        )  # torch sends what a rank raises to the others


class Restored(NamedTuple):
    """The snapshot that :func:`restore` loaded.

    Args:
        path: its directory or URL.
        lost: damaged snapshots that are as new or newer. They are in quarantine now.
    """

    step: int
    path: str
    lost: list[DamagedSnapshot]


class _Assignment(NamedTuple):
    """The coordinator's order to a rank. ``staging``: name of the staging directory; "" if there is none."""

    rank: int
    staging: str


class _Written(NamedTuple):
    """A rank's report of an item."""

    entry: FileEntry
    item: Item


class _NotWritten(NamedTuple):
    reason: str


class _StepRead(NamedTuple):
    """The value of ``step_key``, as the rank that writes it read it. ``step``: None if it is not a step."""

    step: int | None
    shown: str


class SnapshotWriter(StorageWriter):
    """Stores the states of ``dcp.save`` and ``dcp.async_save`` in a directory.

    A save's step is the value of ``step_key`` in its state, or :attr:`step`, or else the step in its ``checkpoint_id``
    (see :func:`~chaoskit.checkpoint.step_names.step_of`). Retention and restore go by it, never by another number.

    Args:
        tier: a directory that all ranks share, on a disk or in shared memory, or its path.
        on_failure: ``raise`` lets ``dcp.save`` raise; ``report`` logs the failure, keeps it in :attr:`failures` and
            lets training go on.
        committed: called by the coordinator with each snapshot that counts: the place to start an upload.
        step_key: path of an integer in the state, such as ``loop.step``, that says how many steps it has.

    Attributes:
        failures: of the last save.
        step: of the saves from now on; None if their names say it. A thread of ``dcp.async_save`` reads it late: there
            use ``step_key`` or names.
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
        self._given: int | None = None  # as ``step``
        self._named: int | None = None  # by the name of the next save
        self._step: int | None = None  # of the save that is under way; None until its state says it
        self._staging: Staging | None = None
        self._world = 1

    @property
    def step(self) -> int | None:
        return self._given

    @step.setter
    def step(self, step: int | None) -> None:
        if self.step_key and step is not None:
            raise BadInput("step", step, f"leave it out: step_key={self.step_key!r} names the step")
        if step is not None and _as_step(step) is None:
            raise BadInput("step", step, "give one whole number, 0 or more")
        self._given = step

    # -- called by torch, in this order ---------------------------------------------------------------------------

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take the name of the next save. torch does not call this for a save without a name."""
        is_given = bool(self.step_key) or self._given is not None
        self._named = None if checkpoint_id is None or is_given else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise BadInput(
                "use_collectives", False, "leave it True: one process commits what all have written"
            )
        self._step = self._named if self._given is None else self._given
        self._named = None
        if self._step is None and not self.step_key:
            raise BadInput(
                "checkpoint_id",
                None,
                "name the step, such as checkpoint_id='step-120', or give step_key=",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(
            plan.usable for plan in plans
        ):  # the planner puts an old plan in their place, and an old directory
            raise BadInput(
                "enable_plan_caching",
                True,
                "leave it False: each snapshot has a directory of its own",
            )
        if self._staging is not None:  # of a save that ended without a word, as when a rank is lost
            self._staging.abandon()
        self._staging, self._world, self.failures = None, len(plans), []
        self._require_one_step(plans)
        try:
            self._staging = self.tier.begin(self._step or 0)
        except OSError as error:
            self._note(str(error))
        name = self._staging.name if self._staging is not None else ""
        return [
            dataclasses.replace(plan, storage_data=_Assignment(rank, name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
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
            except Exception as error:  # noqa: BLE001 -- the coordinator reports it, whatever it is
                reason = f"rank {assignment.rank}: {reason_of(error)}"
                results.append(WriteResult(MetadataIndex(""), 0, _NotWritten(reason)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        reports = [result.storage_data for of_rank in results for result in of_rank]
        staging, self._staging = self._staging, None
        if staging is not None:
            with staging:
                self._take_step([report for report in reports if isinstance(report, _StepRead)])
                if reasons := [
                    report.reason for report in reports if isinstance(report, _NotWritten)
                ]:
                    self._note("; ".join(reasons))
                else:
                    self._commit(
                        staging,
                        [report for report in reports if isinstance(report, _Written)],
                        metadata,
                    )
        metadata.version, metadata.storage_meta = CURRENT_DCP_VERSION, self.storage_meta()
        if self.failures and self.on_failure == "raise":
            raise self.failures[0]

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.tier.root), save_id=str(self._step))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return names_step(checkpoint_id)

    # -- the coordinator's --------------------------------------------------------------------------------------------

    def _require_one_step(self, plans: list[SavePlan]) -> None:
        """Raise BadInput if ranks name different steps, or nothing in the state has the path ``step_key``."""
        steps = {plan.storage_data for plan in plans if isinstance(plan.storage_data, int)}
        if len(steps) > 1:
            raise BadInput("checkpoint_id", sorted(steps), "name the same step on all ranks")
        paths = {item.index.fqn for plan in plans for item in plan.items}
        if self.step_key and self.step_key not in paths:
            alike = sorted(path for path in paths if "step" in path.rpartition(".")[2]) or sorted(
                paths
            )
            shown = ", ".join(alike[:_SHOWN_PATHS]) or "nothing"
            raise BadInput(
                "step_key", self.step_key, f"name an integer of the state, which has {shown}"
            )

    def _take_step(self, readings: list[_StepRead]) -> None:
        """Set the step from ``step_key``. Raises BadInput if its value is not a step, or ranks differ in it."""
        if not readings:
            return
        if len(readings) != readings.count(readings[0]) or readings[0].step is None:
            values = " and ".join(sorted({reading.shown for reading in readings}))
            raise BadInput(
                "step_key", self.step_key, f"name one whole number, 0 or more, not {values}"
            )
        self._step = readings[0].step

    def _commit(self, staging: Staging, written: list[_Written], metadata: Metadata) -> None:
        entries = {one.entry.name: one.entry for one in written}
        part = Part(tuple(entries.values()), tuple(one.item for one in written))
        keys = {
            path: tuple(place)
            for path, place in (metadata.planner_data or {}).items()
            if place != (path,)
        }
        assert self._step is not None
        if self.step_key:  # it was not known when the snapshot was begun
            staging.step, staging.generation = self._step, self.tier.free_generation(self._step)
        try:
            snapshot = staging.commit([part], world=self._world, keys=keys)
        except OSError as error:
            self._note(str(error))
            return
        self._warn_of_newer(snapshot)
        try:
            self.tier.prune()
        except OSError as error:  # the snapshot is there all the same
            _log.warning("old snapshots below %s were not deleted: %s", self.tier.root, error)
        if self.committed is not None:
            self.committed(snapshot)

    def _warn_of_newer(self, snapshot: Snapshot) -> None:
        """Log that a restore would not take the snapshot that was just stored."""
        newest = self.tier.newest_step()
        if newest > snapshot.manifest.step:
            text = "step %s was saved, and step %s is there: a restore takes that one. Move it away, or load it"
            _log.warning(text, snapshot.manifest.step, newest)

    def _note(self, reason: str) -> None:
        failure = SaveFailed(-1 if self._step is None else self._step, str(self.tier.root), reason)
        _log.warning("%s", failure)
        self.failures.append(failure)


def _as_step(value: object) -> int | None:
    """Return a value as a step; None if it is not one whole number, 0 or more."""
    if isinstance(value, torch.Tensor):
        is_whole = not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
        value = value.item() if is_whole and value.numel() == 1 else None
    is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return int(value) if is_step else None  # type: ignore[call-overload]


def _read_step(item: WriteItem, planner: SavePlanner) -> _StepRead:
    """Return the value of ``step_key``."""
    value: object = planner.resolve_data(item)
    if isinstance(value, io.BytesIO):
        value = torch.load(io.BytesIO(value.getbuffer()), weights_only=True)
    return _StepRead(_as_step(value), " ".join(repr(value).split())[:_SHOWN_CHARS])


def _write(
    items: list[WriteItem], planner: SavePlanner, staging: Staging, rank: int
) -> list[WriteResult]:
    """A rank's file, if it has anything to write."""
    if not items:
        return []
    with staging.writer(f"__{rank}_0{DATA_SUFFIX}") as writer:
        stored = [_add(writer, item, planner) for item in items]
        (entry,) = writer.finish().files
    return [WriteResult(index_of(item), item.size_bytes, _Written(entry, item)) for item in stored]


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

    Each rank reads what it needs.

    Args:
        place: a tier, or the directory or URL of snapshots or of one of them.
        step: which one; None for the newest whose manifest can be read.

    A ``checkpoint_id`` of ``dcp.load`` names another step, or one snapshot, for that load.
    """

    @typed_arguments
    def __init__(self, place: Place, step: int | None = None) -> None:
        self.step = step
        self.snapshot: Snapshot | None = None
        self._name = ""  # of the one snapshot that counts; "" for any
        self._asked = ""  # the name of the one snapshot that the next load takes; "" for any
        self._asked_step: int | None = None
        if isinstance(place, str | Path):
            root, slash, name = str(place).rpartition("/")
            if parse_name(name) is not None:
                place, self._name = root or slash or ".", name
        self.tier = _opened(place)

    @classmethod
    def of(cls, tier: DiskTier | RemoteTier, name: str) -> SnapshotReader:
        """A reader of the snapshot of that name."""
        reader = cls(tier)
        reader._name = name
        return reader

    @property
    def checkpoint_id(self) -> CheckpointId:
        """For torch's log."""
        return _address(self.tier, self._name)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Take the name of the next load. torch does not call this for a load without a name."""
        self._asked, self._asked_step = "", None
        if checkpoint_id is None:
            return
        self._asked_step = step_of(checkpoint_id)
        name = Path(checkpoint_id).name
        self._asked = name if parse_name(name) is not None else ""
        if self._name and (parse_name(self._name) or (0,))[0] != self._asked_step:
            raise BadInput(
                "checkpoint_id",
                str(checkpoint_id),
                f"leave it out: the reader's place is {self._name}",
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.snapshot = self._choose()
        metadata = build_metadata(self.snapshot.manifest)
        address = _address(self.tier, self.snapshot.name)
        metadata.storage_meta = StorageMeta(checkpoint_id=address, load_id=str(uuid.uuid4()))
        return metadata

    def _choose(self) -> Snapshot:
        step = self.step if self._asked_step is None else self._asked_step
        if name := self._name or self._asked:
            if isinstance(self.tier, RemoteTier):
                return self.tier.open(name)
            if not self.tier.root.is_dir():  # on another host: the snapshot is not damaged
                raise BadInput("place", str(self.tier.root), "use a directory that all ranks see")
            return Snapshot.open(self.tier.root / name)
        for one in _snapshots(self.tier):
            if isinstance(one, DamagedSnapshot):
                _log.warning("%s is passed over: %s", _address(self.tier, one.name), one.reason)
            elif step in (None, one.manifest.step):
                return one
        wanted = "a snapshot" if step is None else f"one of step {step}"
        raise BadInput("place", _address(self.tier), f"name one that holds {wanted}")

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
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
        self._asked, self._asked_step = "", None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return names_step(checkpoint_id)


def restore(
    state_dict: dict[str, Any],
    *,
    memory: DiskTier | str | Path | None = None,
    disk: DiskTier | str | Path | None = None,
    remote: RemoteTier | str | None = None,
) -> Restored | None:
    """Load the newest complete snapshot of the places that are given, on all ranks. None if there is no snapshot.

    All ranks call this with the same places. The bytes are verified as they are read. A snapshot that is damaged is
    quarantined, and the newest of those that are left is tried; of equally new ones the nearest.

    Args:
        memory: a directory in shared memory, such as one below ``/dev/shm``.
        disk: a directory.
        remote: a URL, or a tier with its credentials.

    Raises:
        NothingToRestore: if there are snapshots, and none of them is whole. The state dict holds anything then.
        RemoteUnavailable: if the store does not answer: it may hold the newest snapshot.
        CheckpointException: if a rank cannot load the snapshot for another reason than damage.
    """
    memory = convert("memory", memory, DiskTier | str | Path | None)
    disk = convert("disk", disk, DiskTier | str | Path | None)
    remote = convert("remote", remote, RemoteTier | str | None)
    tiers = [_opened(place) for place in (memory, disk, remote) if place is not None]
    if not tiers:
        raise BadInput("disk", None, "name a place: memory, disk or remote")
    try:
        return _restore(state_dict, tiers)
    finally:
        if isinstance(remote, str) and isinstance(tiers[-1], RemoteTier):
            tiers[-1].close()


def _restore(state_dict: dict[str, Any], tiers: Sequence[DiskTier | RemoteTier]) -> Restored | None:
    lost: list[DamagedSnapshot] = []  # of the coordinator
    while True:
        offered, told = _from_coordinator(partial(_offer, tiers, lost))
        if offered is None:
            if told:
                raise NothingToRestore(", ".join(map(_address, tiers)), told)
            return None
        tier, (step, _) = tiers[offered.tier], offered.age
        try:
            load(state_dict, storage_reader=SnapshotReader.of(tier, offered.name))
        except CheckpointException as error:
            if (damage := _damage(error.failures)) is None:
                raise
            if _is_coordinator():
                lost.append(_set_aside(tier, offered.name, damage))
            continue
        return Restored(
            step, _address(tier, offered.name), [one for one in told if one.step >= step]
        )


class _Offered(NamedTuple):
    """The next snapshot to try, and the number of its tier."""

    age: tuple[int, int]
    tier: int
    name: str


def _offer(
    tiers: Sequence[DiskTier | RemoteTier], lost: list[DamagedSnapshot]
) -> tuple[_Offered | None, list[DamagedSnapshot]]:
    """The newest snapshot with a manifest that can be read. Newer ones of its tier without one go to ``lost``."""
    newest: _Offered | None = None
    for number, tier in enumerate(tiers):
        for one in _snapshots(tier):
            if isinstance(one, DamagedSnapshot):
                lost.append(_set_aside(tier, one.name, one.reason))
                continue
            if newest is None or one.manifest.age > newest.age:
                newest = _Offered(one.manifest.age, number, one.name)
            break
    return newest, lost


def _snapshots(tier: DiskTier | RemoteTier) -> Iterator[Snapshot | DamagedSnapshot]:
    """The snapshots of a tier, the newest first. Manifests are read, data files are not."""
    if isinstance(tier, DiskTier):
        listing = tier.snapshots()
        found: list[Snapshot | DamagedSnapshot] = [*listing.snapshots, *listing.damaged]
        yield from sorted(found, key=lambda one: parse_name(one.name) or (-1, -1), reverse=True)
        return
    for name, data in tier.candidates():
        try:
            yield RemoteSnapshot(Path(name), checked_manifest(name, data), tier.store)
        except Damaged as error:
            yield DamagedSnapshot(name, Path(name), str(error))


def _set_aside(tier: DiskTier | RemoteTier, name: str, reason: str) -> DamagedSnapshot:
    if isinstance(tier, DiskTier):
        return tier.quarantine(tier.root / name, reason)
    return tier.set_aside(name, reason)


def _opened(place: Place) -> DiskTier | RemoteTier:
    if isinstance(place, DiskTier | RemoteTier):
        return place
    return RemoteTier(str(place)) if isinstance(place, str) and "://" in place else DiskTier(place)


def _address(tier: DiskTier | RemoteTier, name: str = "") -> str:
    """Path or URL of a tier, or of a snapshot in it."""
    root = str(tier.root) if isinstance(tier, DiskTier) else tier.store.url
    return f"{root}/{name}" if name else root


def _damage(failures: Mapping[int, Any]) -> str | None:
    """The damage of the snapshot; None if a rank failed for another reason."""
    for failure in failures.values():
        error = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(error, Damaged):
            return str(error)
    return None


def _is_coordinator() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _from_coordinator(produce: Callable[[], _Value]) -> _Value:
    """The coordinator's value on every rank, or its error."""
    if not dist.is_initialized():
        return produce()
    told: list[Any] = [None, None]
    if _is_coordinator():
        try:
            told[0] = produce()
        except (ChaoskitError, OSError) as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    value: _Value = told[0]
    return value
