"""The remote tier: committed snapshots below one URL, the newest of which that is not damaged is restored."""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from chaoskit.checkpoint.layout import Box
from chaoskit.checkpoint.manifest import MANIFEST, Damaged, FileEntry, Manifest, decode_manifest
from chaoskit.checkpoint.reading import Segment
from chaoskit.checkpoint.remote import fetch
from chaoskit.checkpoint.remote.opening import open_store
from chaoskit.checkpoint.remote.source import Source
from chaoskit.checkpoint.remote.store import Store, Traffic
from chaoskit.checkpoint.remote.upload import QUARANTINE, Sent, Upload, Verification, quarantine_note
from chaoskit.checkpoint.snapshot import Snapshot
from chaoskit.errors import ChaoskitError

_NAME = re.compile(r"step-(\d{8,})\.g(\d+)")
_log = logging.getLogger(__name__)


class NothingToRestore(ChaoskitError):
    """No snapshot is there that is complete and undamaged. Says which were set aside."""


def snapshot_name(manifest: Manifest) -> str:
    """The name of its directory."""
    return f"step-{manifest.step:08d}.g{manifest.generation}"


def age_of(name: str) -> tuple[int, int] | None:
    """Step and generation of the snapshot in a directory of that name; None if it is not ours."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class Restored:
    """What was read, and what was newer but damaged: name and reason."""

    manifest: Manifest
    name: str
    damaged: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RemoteSnapshot(Snapshot):
    """A committed snapshot in a store."""

    store: Store

    def fill(self, wanted: Sequence[tuple[FileEntry, Sequence[Segment]]]) -> None:
        fetch.fill(self.store, self.name, wanted)


class RemoteTier:
    """Snapshots below a URL.

    Args:
        url: such as ``s3://bucket/run``, ``gs://bucket/run``, ``file:///mnt/run``, ``memory://run``.
        storage_options: what fsspec's file system takes: credentials, endpoint, and so on.
        traffic: time limits, back-off, bandwidth, requests at a time.
        verification: how what was uploaded is verified.

    Raises:
        BadInput: if the URL is none, or what it takes is not installed.

    Every method may raise RemoteRefused at once, or RemoteUnavailable after the deadline of the back-off.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
        verification: Verification = "store",
    ) -> None:
        self.store = open_store(url, storage_options, traffic)
        self._verification = verification

    def names(self) -> list[str]:
        """Of the committed snapshots that are not set aside, the newest first. Asks for each directory."""
        return list(self.newest())

    def newest(self) -> Iterator[str]:
        """The same, one after the other: the first costs two requests, however many there are."""
        ages = {name: age_of(name) for name in self.store.directories()}
        ours = sorted(((age, name) for name, age in ages.items() if age is not None), reverse=True)
        for _, name in ours:
            sizes = self.store.sizes(name)
            if MANIFEST in sizes and QUARANTINE not in sizes:
                yield name

    def open(self, name: str) -> RemoteSnapshot:
        """Read the manifest of a snapshot.

        Raises:
            Damaged: if there is none, or it is not what was written.
        """
        return RemoteSnapshot(PurePosixPath(name), checked_manifest(name, self.manifest_bytes(name)), self.store)

    def manifest_bytes(self, name: str) -> bytes:
        """Raises Damaged if there is none."""
        try:
            return self.store.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            raise Damaged("it has no manifest") from None

    def upload(self, source: Source) -> Sent:
        """Send what is not there yet, verify it and commit it. See :meth:`Upload.run` for what it raises."""
        return Upload(self.store, snapshot_name(source.manifest), source, self._verification).run()

    def read_into(self, targets: Mapping[str, tuple[Tensor, Box]]) -> Restored:
        """Fill tensors from the newest snapshot that is not damaged; damaged ones are set aside on the way.

        Args:
            targets: by path, the tensor and the box of the stored tensor that it shall hold.

        Raises:
            NothingToRestore: if there is none. After any error the targets hold anything.
        """
        damaged: list[tuple[str, str]] = []
        for name in self.newest():
            try:
                snapshot = self.open(name)
                snapshot.read_into(targets)
            except Damaged as error:
                damaged.append((name, str(error)))
                self.set_aside(name, str(error))
            else:
                return Restored(snapshot.manifest, name, tuple(damaged))
        raise nothing_to_restore(self.store.url, damaged)

    def set_aside(self, name: str, reason: str) -> None:
        """Quarantine a snapshot: it counts no more, and stays for whoever wants to know why. Never raises."""
        _log.warning("%s/%s is damaged and set aside: %s", self.store.url, name, reason)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            self.store.put(f"{name}/{QUARANTINE}", quarantine_note(reason, now))
        except ChaoskitError as error:  # a reader may have no right to write; what is damaged is passed over all the same
            _log.warning("%s/%s could not be marked: %s", self.store.url, name, error)

    def remove(self, name: str) -> None:
        """Delete a snapshot: its manifest first, so that half of it is none."""
        self.store.remove(f"{name}/{MANIFEST}")
        names = [f"{name}/{file}" for file in self.store.sizes(name)]
        for _ in self.store.each(self.store.remove, names):
            pass
        self.store.forget(name)

    def close(self) -> None:
        """End what is under way."""
        self.store.close()


def checked_manifest(name: str, data: bytes) -> Manifest:
    """The manifest of the snapshot of that name. Raises Damaged if it is not."""
    manifest = decode_manifest(data)
    if manifest.age != age_of(name):
        raise Damaged(f"the manifest is of step {manifest.step}, generation {manifest.generation}")
    return manifest


def nothing_to_restore(url: str, damaged: Sequence[tuple[str, str]]) -> NothingToRestore:
    """The error that says what was tried."""
    tried = "; ".join(f"{name}: {reason}" for name, reason in damaged)
    return NothingToRestore(f"{url} has no undamaged snapshot{f' ({tried})' if tried else ''}")
