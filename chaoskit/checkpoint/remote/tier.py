"""Remote tier: committed snapshots below one URL, of which the newest undamaged one is restored.

-> ``daemon/archive.py``: which snapshots of a job are uploaded, and offered after a loss.
-> ``remote/upload.py``: how one is sent and committed. ``remote/store.py``: retries and limits.
-> ``runtime/state/from_store.py``: rank 0 of a job reads one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from chaoskit.checkpoint.disk.inventory import DamagedSnapshot, NothingToRestore
from chaoskit.checkpoint.disk.names import parse_name, snapshot_name
from chaoskit.checkpoint.disk.reading import Segment
from chaoskit.checkpoint.disk.retention import Kept, Retention
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.checkpoint.layout.manifest import (
    MANIFEST,
    Damaged,
    FileEntry,
    Manifest,
    decode_manifest,
)
from chaoskit.checkpoint.remote import fetch
from chaoskit.checkpoint.remote.opening import open_store
from chaoskit.checkpoint.remote.source import DirectorySource
from chaoskit.checkpoint.remote.store import Store, Traffic
from chaoskit.checkpoint.remote.upload import (
    QUARANTINE,
    Sent,
    Upload,
    Verification,
    quarantine_note,
)
from chaoskit.errors import ChaoskitError
from chaoskit.typed import typed_arguments

_log = logging.getLogger(__name__)


class FetchedSnapshot(NamedTuple):
    """The snapshot that was read, and the newer, damaged ones that were quarantined before it."""

    name: str
    manifest: Manifest
    lost: list[DamagedSnapshot]


@dataclass(frozen=True)
class RemoteSnapshot(Snapshot):
    """A committed snapshot in a store."""

    store: Store

    def fill(self, requests: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        """Fill the memory of the segments with verified bytes from the store.

        Raises:
            Damaged, RemoteRefused, RemoteUnavailable: see :func:`fetch.fill`.
        """
        fetch.fill(self.store, self.name, requests)

    def verify(self) -> None:
        """Read every file, and compare all digests. Raise Damaged at a difference.

        The traffic is that of a full restore. Raise RemoteRefused or RemoteUnavailable if the store
        refuses or does not answer.
        """
        fetch.verify(self.store, self.name, self.manifest.files)

    def download(self, directory: Path) -> Path:
        """Copy the snapshot, verified, into a new directory below a local one.

        Return the new directory. After an error it stays, incomplete.

        Raises:
            Damaged: if the data does not match the manifest.
            RemoteRefused, RemoteUnavailable: if the store refuses or does not answer.
            OSError: if the new directory exists, or the local disk is full or fails.
        """
        path = directory / self.name
        path.mkdir()
        fetch.download(self.store, self.name, self.manifest.files, path)
        (path / MANIFEST).write_bytes(self.manifest.encode())
        return path


class RemoteTier:
    """A tier that uploads, lists, restores and deletes snapshots below a URL.

    Every method may raise RemoteRefused at once, or RemoteUnavailable after the deadline of the
    back-off.

    Args:
        url: such as ``s3://bucket/run``, ``gs://bucket/run``, ``file:///mnt/run``,
            ``memory://run``.
        storage_options: options of fsspec's file system: credentials, endpoint, and so on.
        traffic: time limits, back-off, bandwidth, requests at a time.
        verification: method of verifying uploads.
        retention: rule for :meth:`prune`.
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.REMOTE`.

    Raises:
        BadInput: if the URL is invalid, or a package that it needs is not installed.
    """

    @typed_arguments
    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
        verification: Verification = "store",
        retention: Retention | None = None,
        at: Hook = undisturbed,
    ) -> None:
        self.store = open_store(url, storage_options, traffic)
        self.retention = retention or Retention()
        self._verification, self._on_boundary = verification, at

    def names(self) -> list[str]:
        """Return the names of committed snapshots that are not quarantined, the newest first.

        Names that are none of a snapshot are left out. This takes a request for each directory.
        """
        return list(self.committed_names())

    def committed_names(self) -> Iterator[str]:
        """Yield the names of :meth:`names` one by one.

        A request lists the directories, and another one looks into each that is reached.
        """
        for name, sizes in self.directories():
            if _is_committed(sizes):
                yield name

    def directories(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield name and objects (size in bytes by name) of every snapshot, the newest first.

        Uncommitted snapshots are included.
        """
        ages = {name: parse_name(name) for name in self.store.directories()}
        for _, name in sorted(((age, name) for name, age in ages.items() if age), reverse=True):
            yield name, self.store.sizes(name)

    def candidates(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and manifest of the committed snapshots, the newest first.

        Snapshots that are deleted meanwhile are skipped.
        """
        for name in self.committed_names():
            try:
                yield name, self.store.get(f"{name}/{MANIFEST}")
            except FileNotFoundError:
                continue

    def open(self, name: str) -> RemoteSnapshot:
        """Return the snapshot with this name. Only its manifest is read.

        Raises:
            Damaged: if the manifest is missing, was changed, or names another snapshot.
        """
        try:
            data = self.store.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise Damaged("it has no manifest") from None
        return RemoteSnapshot(Path(name), checked_manifest(name, data), self.store)

    def upload(self, source: DirectorySource) -> Sent:
        """Send the missing files of a snapshot, verify and commit it, and return the result.

        Old snapshots stay until :meth:`prune`. Raises the errors of :meth:`Upload.run`.
        """
        return Upload(
            self.store,
            snapshot_name(*source.manifest.age),
            source,
            self._verification,
            self._on_boundary,
        ).run()

    def read_into(self, targets: Mapping[str, tuple[Tensor, Box]]) -> FetchedSnapshot:
        """Fill tensors from the newest undamaged snapshot, and return its name and manifest.

        Newer, damaged snapshots are quarantined and returned, too.

        Args:
            targets: by path, a tensor and the box of the stored tensor to fill it with.

        Raises:
            NothingToRestore: if there is none. The targets hold garbage after any error.
            ChaoskitError: if the snapshot is not damaged, and lacks a path or part of a box.
            BadInput: if a target has another shape than its box.
        """
        lost: list[DamagedSnapshot] = []
        for name, data in self.candidates():
            try:
                manifest = checked_manifest(name, data)
                RemoteSnapshot(Path(name), manifest, self.store).read_into(targets)
            except Damaged as error:
                lost.append(self.set_aside(name, str(error)))
            else:
                return FetchedSnapshot(name, manifest, lost)
        raise NothingToRestore(self.store.url, lost)

    def set_aside(self, name: str, reason: str) -> DamagedSnapshot:
        """Quarantine a snapshot: it is not restored any more, and kept for inspection.

        Return its description. If the store cannot be written, the snapshot stays as it is and the
        failure is logged.
        """
        _log.warning("%s/%s is damaged and is quarantined: %s", self.store.url, name, reason)
        try:
            self.mark(name, reason)
        except ChaoskitError as error:  # a reader may lack the right to write
            _log.warning("%s/%s could not be marked: %s", self.store.url, name, error)
        return DamagedSnapshot(name, Path(name), reason)

    def mark(self, name: str, reason: str) -> None:
        """Write the mark of a quarantined snapshot, which other readers see.

        Does nothing if the snapshot has the mark already, is not committed, or is being deleted.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if _is_committed(self.store.sizes(name)):  # otherwise it is just being deleted
            self.store.put(f"{name}/{QUARANTINE}", quarantine_note(reason, now))

    def remove(self, name: str) -> None:
        """Delete a snapshot. Its manifest goes first, so that the rest counts as no snapshot."""
        self._on_boundary("expire")
        self.store.remove(f"{name}/{MANIFEST}")
        self._on_boundary("expired")
        names = [f"{name}/{file}" for file in self.store.sizes(name)]
        for _ in self.store.each(self.store.remove, names):
            pass
        self.store.forget(name)

    def prune(self) -> list[str]:
        """Delete the snapshots that the retention does not keep.

        Return their names, the oldest first. All listed snapshots count as verified, because a
        snapshot is committed only after verification.
        """
        doomed = self.doomed()
        for name in doomed:
            self.remove(name)
        return doomed

    def doomed(self, verified: Collection[tuple[int, int]] | None = None) -> list[str]:
        """Return the names of the snapshots that :meth:`prune` would delete, the oldest first.

        Manifests are read if anything would be deleted. A snapshot whose manifest does not match
        its name neither counts nor is deleted.

        Args:
            verified: step and generation of undamaged snapshots; None for all.
        """
        present = {}
        for name, sizes in self.directories():
            age = parse_name(name)
            if _is_committed(sizes) and age:
                present[Kept(*age, sum(sizes.values()))] = name
        if not self._deletable(present, verified):
            return []
        present = {kept: name for kept, name in present.items() if self._matches_name(name)}
        return [present[kept] for kept in self._deletable(present, verified)]

    def _deletable(
        self, present: Collection[Kept], verified: Collection[tuple[int, int]] | None
    ) -> list[Kept]:
        """Return the snapshots that the retention allows to delete, the oldest first."""
        verified_ages = {kept.age for kept in present} if verified is None else verified
        return self.retention.doomed(present, verified_ages)

    def _matches_name(self, name: str) -> bool:
        """Return True if the manifest of a snapshot is readable and matches its name.

        Otherwise log a warning.
        """
        try:
            self.open(name)
        except Damaged as error:
            _log.warning("%s/%s is not counted as a snapshot: %s", self.store.url, name, error)
            return False
        return True

    def close(self) -> None:
        """Cancel the requests under way. Later ones raise RemoteUnavailable."""
        self.store.close()


def checked_manifest(name: str, data: bytes) -> Manifest:
    """Return the manifest that ``data`` encodes, which must be that of the snapshot ``name``.

    Raise Damaged if it is damaged or belongs to another snapshot.
    """
    manifest = decode_manifest(data)
    if manifest.age != parse_name(name):
        raise Damaged(f"its manifest names {snapshot_name(*manifest.age)}")
    return manifest


def _is_committed(sizes: Mapping[str, int]) -> bool:
    """Return True if the objects are those of a committed snapshot that is not quarantined."""
    return MANIFEST in sizes and QUARANTINE not in sizes
