"""Stored snapshots as who looks after them sees them: the same questions to a directory and to a store behind a URL."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from chaoskit.checkpoint.disk.drill import Drill, drill
from chaoskit.checkpoint.disk.inventory import DamagedSnapshot
from chaoskit.checkpoint.disk.names import QUARANTINE, STAGING
from chaoskit.checkpoint.disk.retention import Retention
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.tier import DiskTier
from chaoskit.checkpoint.layout.manifest import MANIFEST, Damaged
from chaoskit.checkpoint.remote.backoff import Backoff, RemoteRefused, RemoteUnavailable
from chaoskit.checkpoint.remote.store import Traffic
from chaoskit.checkpoint.remote.tier import RemoteTier
from chaoskit.checkpoint.remote.upload import QUARANTINE as QUARANTINE_NOTE
from chaoskit.config import validate_endpoint
from chaoskit.errors import BadInput


class Contents(NamedTuple):
    """What is there, the newest first.

    ``damaged``: their manifest cannot be used. ``quarantine``, ``unfinished``: names of what was set aside, and of what
    is being written, or was when its writer died.
    """

    snapshots: list[Snapshot]
    damaged: list[DamagedSnapshot]
    quarantine: list[str]
    unfinished: list[str]


class Inspected(Protocol):
    """A tier that outlives the job."""

    def contents(self) -> Contents:
        """What is there. Manifests are read, data files are not."""
        ...

    def place(self, name: str) -> str:
        """Path or URL of a snapshot."""
        ...

    def verify(self, snapshot: Snapshot) -> str | None:
        """Read all of a snapshot. What is wrong with it; None if nothing is."""
        ...

    def set_aside(self, name: str, reason: str) -> str:
        """Quarantine a snapshot; returns where it is then."""
        ...

    def drill(self, snapshot: Snapshot) -> Drill:
        """Load a snapshot in a fresh process, twice, and compare. Raises HarnessError if that process breaks."""
        ...

    def doomed(self) -> list[str]:
        """What :meth:`prune` would delete."""
        ...

    def prune(self) -> list[str]:
        """Delete what the retention does not keep, and never the newest that is whole; returns names, oldest first."""
        ...

    def sweep(self) -> list[str]:
        """Remove what dead processes left half written; returns the names."""
        ...


@contextmanager
def opened(
    root: str, *, endpoint: str = "", deadline_s: float = 30.0, retention: Retention | None = None
) -> Iterator[Inspected]:
    """The snapshots below a directory or a URL.

    Args:
        endpoint: where an S3 store listens that is not Amazon's; "" for Amazon's.
        deadline_s: a store that does not answer is asked again for so long.

    Raises:
        BadInput: if there is nothing of that name, or what the URL takes is not installed; in the block, too, if the
            store refuses or does not answer.
    """
    validate_endpoint("endpoint", endpoint, root)
    protocol, is_url, place = root.rpartition("://")
    if protocol in {"", "file", "local"} and not Path(place).is_dir():
        raise BadInput(
            "root", root, "name a directory of snapshots, or a URL such as s3://bucket/run"
        )
    if not is_url:
        yield _Directory(DiskTier(root, retention=retention))
        return
    tier = RemoteTier(
        root,
        storage_options={"endpoint_url": endpoint} if endpoint else {},
        traffic=Traffic(backoff=Backoff(deadline_s=deadline_s)),
        retention=retention,
    )
    try:
        yield _Store(tier)
    except (RemoteRefused, RemoteUnavailable) as error:
        raise BadInput("root", root, str(error).removeprefix(f"{root}: ")) from error
    finally:
        tier.close()


class _Directory:
    """The disk tier."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.verify, self.prune, self.sweep = tier.verify, tier.prune, tier.sweep

    def contents(self) -> Contents:
        listing = self._tier.snapshots()
        aside, writing = (
            [path.name for path in sorted((self._tier.root / directory).glob("*"))]
            for directory in (QUARANTINE, STAGING)
        )
        return Contents(listing.snapshots, listing.damaged, aside, writing)

    def place(self, name: str) -> str:
        return str(self._tier.root / name)

    def set_aside(self, name: str, reason: str) -> str:
        return str(self._tier.quarantine(self._tier.root / name, reason).path)

    def drill(self, snapshot: Snapshot) -> Drill:
        return drill(snapshot.path)

    def doomed(self) -> list[str]:
        return [snapshot.name for snapshot in self._tier.doomed()]


class _Store:
    """The remote tier. Its errors come through as they are."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier

    def contents(self) -> Contents:
        found = Contents([], [], [], [])
        for name, sizes in self._tier.directories():
            if QUARANTINE_NOTE in sizes:
                found.quarantine.append(name)
            elif MANIFEST not in sizes:
                found.unfinished.append(name)
            else:
                try:
                    found.snapshots.append(self._tier.open(name))
                except Damaged as error:
                    found.damaged.append(DamagedSnapshot(name, Path(name), str(error)))
        return found

    def place(self, name: str) -> str:
        return f"{self._tier.store.url.rstrip('/')}/{name}"

    def verify(self, snapshot: Snapshot) -> str | None:
        try:
            snapshot.verify()
        except Damaged as error:
            return str(error)
        return None

    def set_aside(self, name: str, reason: str) -> str:
        self._tier.mark(name, reason)
        return self.place(name)

    def drill(self, snapshot: Snapshot) -> Drill:
        """Plain torch reads directories: the snapshot is copied into one, which is removed afterwards."""
        manifest = snapshot.manifest
        with tempfile.TemporaryDirectory(prefix="chaoskit-drill-") as directory:
            if shutil.disk_usage(directory).free < manifest.size_bytes:
                remedy = f"name a directory with {manifest.size_bytes / 1e9:.2f} GB of room, which {snapshot.name} takes"
                raise BadInput("TMPDIR", tempfile.gettempdir(), remedy)
            started_s = time.perf_counter()
            try:
                copy = self._tier.open(snapshot.name).download(Path(directory))
            except Damaged as error:
                return Drill(manifest.step, problem=str(error))
            download_s = time.perf_counter() - started_s
            return msgspec.structs.replace(drill(copy), download_s=download_s)

    def doomed(self) -> list[str]:
        """Objects may be damaged at rest since they were committed, so one is verified before others are given up."""
        if not self._tier.doomed():
            return []
        whole = (one.manifest.age for one in self.contents().snapshots if self.verify(one) is None)
        newest = next(whole, None)
        return self._tier.doomed({newest}) if newest else []

    def prune(self) -> list[str]:
        doomed = self.doomed()
        for name in doomed:
            self._tier.remove(name)
        return doomed

    def sweep(self) -> list[str]:
        """Nothing: nobody can see who is uploading, and an upload that broke off goes on where it stood."""
        return []
