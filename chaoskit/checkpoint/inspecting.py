"""Operations on stored snapshots for the command line, on a directory or a remote store.

-> ``cli/training/checkpoint.py``: the command. ``disk/drill.py``: the drill of one directory.
"""

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
    """The contents of a tier, the newest snapshot first.

    Attributes:
        snapshots: complete snapshots.
        damaged: snapshots whose manifest cannot be used.
        quarantine: names of quarantined snapshots; in a directory they have a suffix.
        unfinished: names of snapshots that are being written, or were when their writer died; in a
            directory they have a suffix.
    """

    snapshots: list[Snapshot]
    damaged: list[DamagedSnapshot]
    quarantine: list[str]
    unfinished: list[str]


class Inspected(Protocol):
    """The interface of a tier that outlives the job.

    Operations on a directory may raise OSError, those on a store RemoteRefused or
    RemoteUnavailable.
    """

    def contents(self) -> Contents:
        """Return the contents. Manifests are read, data files are not."""
        ...

    def place(self, name: str) -> str:
        """Return the path or URL of a snapshot."""
        ...

    def verify(self, snapshot: Snapshot) -> str | None:
        """Read all of a snapshot. Return a description of its damage, or None."""
        ...

    def set_aside(self, name: str, reason: str) -> str:
        """Quarantine a snapshot and return its path or URL.

        A directory is moved, and its new path is returned. A remote snapshot stays in its place and
        is marked, unless it is marked already or not committed.
        """
        ...

    def drill(self, snapshot: Snapshot) -> Drill:
        """Load a snapshot in a fresh process, with our reader and with torch's, and compare.

        Return the result, which also names the damage of a damaged snapshot.

        Raises:
            HarnessError: if that process fails without a result.
            BadInput: if the temporary directory has too little room for a remote snapshot.
        """
        ...

    def doomed(self) -> list[str]:
        """Return the names of the snapshots that :meth:`prune` would delete, the oldest first.

        Snapshots may be read to find an undamaged one, as by :meth:`prune`.
        """
        ...

    def prune(self) -> list[str]:
        """Delete the snapshots that the retention does not keep. Return their names, oldest first.

        The newest snapshot and the newest verified one always stay. If none is verified yet,
        snapshots are read until one is undamaged. Nothing is deleted if all are damaged.
        """
        ...

    def sweep(self) -> list[str]:
        """Remove unfinished snapshots of dead processes. Return the names of their directories.

        Nothing is removed from a remote store.
        """
        ...


@contextmanager
def opened(
    root: str, *, endpoint: str = "", deadline_s: float = 30.0, retention: Retention | None = None
) -> Iterator[Inspected]:
    """Yield the tier at a directory or a URL, which is open for the time of a with statement.

    Args:
        root: the directory or URL.
        endpoint: address of an S3 store that is not Amazon's; "" for Amazon's.
        deadline_s: time for which a store that does not answer is asked again.
        retention: rule for ``prune``.

    Raises:
        BadInput: if the directory does not exist, the endpoint or the URL is invalid, or a package
            that the URL needs is not installed. A RemoteRefused or RemoteUnavailable that leaves
            the block becomes a BadInput, too.
    """
    validate_endpoint("endpoint", endpoint, root)
    protocol, is_url, place = root.rpartition("://")
    if protocol in {"", "file", "local"} and not Path(place).is_dir():
        raise BadInput(
            "root", root, "name a directory of snapshots, or a URL such as s3://bucket/run"
        )
    if not is_url:
        yield _InspectedDirectory(DiskTier(root, retention=retention))
        return
    tier = RemoteTier(
        root,
        storage_options={"endpoint_url": endpoint} if endpoint else {},
        traffic=Traffic(backoff=Backoff(deadline_s=deadline_s)),
        retention=retention,
    )
    try:
        yield _InspectedStore(tier)
    except (RemoteRefused, RemoteUnavailable) as error:
        raise BadInput("root", root, str(error).removeprefix(f"{root}: ")) from error
    finally:
        tier.close()


class _InspectedDirectory:
    """The operations of :class:`Inspected` on a disk tier."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.verify, self.prune, self.sweep = tier.verify, tier.prune, tier.sweep

    def contents(self) -> Contents:
        listing = self._tier.snapshots()
        quarantined_names, unfinished_names = (
            [path.name for path in sorted((self._tier.root / directory).glob("*"))]
            for directory in (QUARANTINE, STAGING)
        )
        return Contents(listing.snapshots, listing.damaged, quarantined_names, unfinished_names)

    def place(self, name: str) -> str:
        return str(self._tier.root / name)

    def set_aside(self, name: str, reason: str) -> str:
        return str(self._tier.quarantine(self._tier.root / name, reason).path)

    def drill(self, snapshot: Snapshot) -> Drill:
        return drill(snapshot.path)

    def doomed(self) -> list[str]:
        return [snapshot.name for snapshot in self._tier.doomed()]


class _InspectedStore:
    """The operations of :class:`Inspected` on a remote tier. Its errors pass through unchanged."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier

    def contents(self) -> Contents:
        contents = Contents([], [], [], [])
        for name, sizes in self._tier.directories():
            if QUARANTINE_NOTE in sizes:
                contents.quarantine.append(name)
            elif MANIFEST not in sizes:
                contents.unfinished.append(name)
            else:
                try:
                    contents.snapshots.append(self._tier.open(name))
                except Damaged as error:
                    contents.damaged.append(DamagedSnapshot(name, Path(name), str(error)))
        return contents

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
        """Copy the snapshot into a temporary directory, and return the result of a drill there.

        The copy is needed because plain torch reads directories. Damage that the copy finds is the
        result's ``problem``. Raise BadInput if the temporary directory has too little room.
        """
        manifest = snapshot.manifest
        with tempfile.TemporaryDirectory(prefix="chaoskit-drill-") as directory:
            if shutil.disk_usage(directory).free < manifest.size_bytes:
                size_gb = f"{manifest.size_bytes / 1e9:.2f} GB"
                remedy = f"use a directory with {size_gb} of free space for {snapshot.name}"
                raise BadInput("TMPDIR", tempfile.gettempdir(), remedy)
            started_s = time.perf_counter()
            try:
                copy = self._tier.open(snapshot.name).download(Path(directory))
            except Damaged as error:
                return Drill(manifest.step, problem=str(error))
            download_s = time.perf_counter() - started_s
            return msgspec.structs.replace(drill(copy), download_s=download_s)

    def doomed(self) -> list[str]:
        """Return the names that may be deleted, or [] if no snapshot is undamaged.

        Snapshots are read and verified until one is undamaged. Objects may be damaged at rest since
        they were committed.
        """
        if not self._tier.doomed():
            return []
        undamaged_ages = (
            snapshot.manifest.age
            for snapshot in self.contents().snapshots
            if self.verify(snapshot) is None
        )
        newest = next(undamaged_ages, None)
        return self._tier.doomed({newest}) if newest else []

    def prune(self) -> list[str]:
        doomed = self.doomed()
        for name in doomed:
            self._tier.remove(name)
        return doomed

    def sweep(self) -> list[str]:
        """Return [], and remove nothing.

        Other uploaders cannot be seen, and a broken upload can be resumed.
        """
        return []
