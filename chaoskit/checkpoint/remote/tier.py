"""The remote tier: committed snapshots below one URL, the newest of which that is not damaged is restored."""

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


class Restored(NamedTuple):
    """What was read, and the newer snapshots that were set aside on the way to it."""

    name: str
    manifest: Manifest
    lost: list[DamagedSnapshot]


@dataclass(frozen=True)
class RemoteSnapshot(Snapshot):
    """A committed snapshot in a store."""

    store: Store

    def fill(self, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        fetch.fill(self.store, self.name, wanted)

    def verify(self) -> None:
        """Read every file, and compare all digests: as much traffic as a restore of all of it. Raises Damaged."""
        fetch.verify(self.store, self.name, self.manifest.files)

    def download(self, directory: Path) -> Path:
        """Copy all of it into a new directory below a local one, verified; returns that. Raises Damaged."""
        path = directory / self.name
        path.mkdir()
        fetch.download(self.store, self.name, self.manifest.files, path)
        (path / MANIFEST).write_bytes(self.manifest.encode())
        return path


class RemoteTier:
    """Snapshots below a URL.

    Args:
        url: such as ``s3://bucket/run``, ``gs://bucket/run``, ``file:///mnt/run``, ``memory://run``.
        storage_options: what fsspec's file system takes: credentials, endpoint, and so on.
        traffic: time limits, back-off, bandwidth, requests at a time.
        verification: how what was uploaded is verified.
        retention: what :meth:`prune` leaves.
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.REMOTE`.

    Raises:
        BadInput: if the URL is none, or what it takes is not installed.

    Every method may raise RemoteRefused at once, or RemoteUnavailable after the deadline of the back-off.
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
        self._verification, self._at = verification, at

    def names(self) -> list[str]:
        """Of the committed snapshots that are not set aside, the newest first. Asks for each directory."""
        return list(self.newest())

    def newest(self) -> Iterator[str]:
        """The same, one after the other: the first costs two requests, however many there are."""
        for name, sizes in self.directories():
            if _is_committed(sizes):
                yield name

    def directories(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Of every snapshot, committed or not, its name and its objects: size in bytes by name. The newest first."""
        ages = {name: parse_name(name) for name in self.store.directories()}
        for _, name in sorted(((age, name) for name, age in ages.items() if age), reverse=True):
            yield name, self.store.sizes(name)

    def candidates(self) -> Iterator[tuple[str, bytes]]:
        """Name and manifest of the committed snapshots, the newest first; without those that are deleted meanwhile."""
        for name in self.newest():
            try:
                yield name, self.store.get(f"{name}/{MANIFEST}")
            except FileNotFoundError:
                continue

    def open(self, name: str) -> RemoteSnapshot:
        """Read the manifest of a snapshot.

        Raises:
            Damaged: if there is none, or it is not what was written.
        """
        try:
            data = self.store.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise Damaged("it has no manifest") from None
        return RemoteSnapshot(Path(name), checked_manifest(name, data), self.store)

    def upload(self, source: DirectorySource) -> Sent:
        """Send what is not there yet, verify it and commit it. See :meth:`Upload.run` for what it raises."""
        return Upload(
            self.store, snapshot_name(*source.manifest.age), source, self._verification, self._at
        ).run()

    def read_into(self, targets: Mapping[str, tuple[Tensor, Box]]) -> Restored:
        """Fill tensors from the newest snapshot that is not damaged; damaged ones are set aside on the way.

        Args:
            targets: by path, the tensor and the box of the stored tensor that it shall hold.

        Raises:
            NothingToRestore: if there is none. After any error the targets hold anything.
        """
        lost: list[DamagedSnapshot] = []
        for name, data in self.candidates():
            try:
                manifest = checked_manifest(name, data)
                RemoteSnapshot(Path(name), manifest, self.store).read_into(targets)
            except Damaged as error:
                lost.append(self.set_aside(name, str(error)))
            else:
                return Restored(name, manifest, lost)
        raise NothingToRestore(self.store.url, lost)

    def set_aside(self, name: str, reason: str) -> DamagedSnapshot:
        """Quarantine a snapshot: it counts no more, and stays for whoever wants to know why."""
        _log.warning("%s/%s is damaged and set aside: %s", self.store.url, name, reason)
        try:
            self.mark(name, reason)
        except (
            ChaoskitError
        ) as error:  # a reader may have no right to write; it is passed over all the same
            _log.warning("%s/%s could not be marked: %s", self.store.url, name, error)
        return DamagedSnapshot(name, Path(name), reason)

    def mark(self, name: str, reason: str) -> None:
        """The mark of a quarantined snapshot, for everyone who looks."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if _is_committed(self.store.sizes(name)):  # else somebody deletes it just now
            self.store.put(f"{name}/{QUARANTINE}", quarantine_note(reason, now))

    def remove(self, name: str) -> None:
        """Delete a snapshot: its manifest first, so that half of it is none."""
        self._at("expire")
        self.store.remove(f"{name}/{MANIFEST}")
        self._at("expired")
        names = [f"{name}/{file}" for file in self.store.sizes(name)]
        for _ in self.store.each(self.store.remove, names):
            pass
        self.store.forget(name)

    def prune(self) -> list[str]:
        """Delete what the retention does not keep; returns the names, the oldest first.

        A snapshot is committed only when all of it was verified, so each that is listed counts as whole.
        """
        doomed = self.doomed()
        for name in doomed:
            self.remove(name)
        return doomed

    def doomed(self, verified: Collection[tuple[int, int]] | None = None) -> list[str]:
        """What :meth:`prune` would delete. ``verified``: (step, generation) of those known to be whole; None: all.

        Manifests are read if anything would be deleted: a snapshot that is not what its name says neither counts nor
        goes.
        """
        present = {}
        for name, sizes in self.directories():
            age = parse_name(name)
            if _is_committed(sizes) and age:
                present[Kept(*age, sum(sizes.values()))] = name
        if not self._doomed_of(present, verified):
            return []
        present = {kept: name for kept, name in present.items() if self._is_what_it_says(name)}
        return [present[kept] for kept in self._doomed_of(present, verified)]

    def _doomed_of(
        self, present: Collection[Kept], verified: Collection[tuple[int, int]] | None
    ) -> list[Kept]:
        whole = {kept.age for kept in present} if verified is None else verified
        return self.retention.doomed(present, whole)

    def _is_what_it_says(self, name: str) -> bool:
        """Return whether the manifest of a snapshot can be read and has the step and generation of its name."""
        try:
            self.open(name)
        except Damaged as error:
            _log.warning("%s/%s is not counted as a snapshot: %s", self.store.url, name, error)
            return False
        return True

    def close(self) -> None:
        """End what is under way."""
        self.store.close()


def checked_manifest(name: str, data: bytes) -> Manifest:
    """The manifest of the snapshot of that name. Raises Damaged if it is not."""
    manifest = decode_manifest(data)
    if manifest.age != parse_name(name):
        raise Damaged(f"its manifest is of {snapshot_name(*manifest.age)}")
    return manifest


def _is_committed(sizes: Mapping[str, int]) -> bool:
    return MANIFEST in sizes and QUARANTINE not in sizes
