"""A snapshot that is being written, and the order in which it becomes one that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import msgspec

from chaoskit.checkpoint.disk.files import DigestedFile, remove_tree, sync_directory, write_file
from chaoskit.checkpoint.disk.names import parse_name, snapshot_name
from chaoskit.checkpoint.disk.parts import PartWriter
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.layout.boundaries import Hook
from chaoskit.checkpoint.layout.manifest import MANIFEST, Manifest, Part
from chaoskit.errors import BadInput


class Staging:
    """A snapshot that is being written. One process begins and commits it; others may join and add files.

    A context manager for the one that began it: what was not committed is removed.

    Args:
        path: of the staging directory, two levels below the root.
        at: called at each boundary.
        committed: called when the snapshot counts.
    """

    def __init__(self, path: Path, at: Hook, committed: Callable[[Snapshot], None]) -> None:
        self.path, self._at, self._committed = path, at, committed
        name, _, _ = path.name.partition("~")
        age = parse_name(name)
        if age is None:
            raise BadInput("staging", path.name, "use the name of a staging directory")
        self.step, self.generation = age

    @property
    def name(self) -> str:
        """For :meth:`DiskTier.join`, in the other processes."""
        return self.path.name

    def writer(self, file_name: str) -> PartWriter:
        """A new file of the snapshot; each process needs another name.

        Raises:
            OSError: if the disk is full or fails, or somebody has given up the snapshot.
        """
        return PartWriter(DigestedFile(self.path / file_name, self._at))

    def commit(
        self,
        parts: Iterable[Part],
        *,
        world: int = 1,
        keys: Mapping[str, tuple[str | int, ...]] | None = None,
    ) -> Snapshot:
        """Make the snapshot visible. When this returns it outlives a loss of power.

        Args:
            parts: of all processes.
            world: ranks that trained.
            keys: where an item stands in a nested state dict, by its path.

        Raises:
            OSError: if the disk is full or fails; there is no such snapshot then, unless only the last sync failed.
        """
        everything = list(parts)
        manifest = Manifest(
            step=self.step,
            generation=self.generation,
            world=world,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple(entry for part in everything for entry in part.files),
            items=tuple(item for part in everything for item in part.items),
            keys=dict(keys or {}),
        )
        return self._publish(manifest)

    def _publish(self, manifest: Manifest) -> Snapshot:
        from chaoskit.checkpoint.disk.dcp_metadata import (
            METADATA,
            encode_metadata,
        )  # most of a second, the first time

        at, root = self._at, self.path.parents[1]
        at("metadata")
        metadata = write_file(self.path / METADATA, encode_metadata(manifest))
        manifest = msgspec.structs.replace(manifest, files=(*manifest.files, metadata))
        at("manifest")
        write_file(self.path / MANIFEST, manifest.encode(), at, "seal")
        sync_directory(self.path)
        at("commit")
        target = root / snapshot_name(self.step, self.generation)
        self.path.rename(target)
        at("publish")
        sync_directory(root)
        at("committed")
        snapshot = Snapshot(target, manifest)
        self._committed(snapshot)
        return snapshot

    def abandon(self) -> None:
        """Remove what was written. Nothing of it was visible."""
        remove_tree(self.path)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()  # nothing is there any more after a commit
