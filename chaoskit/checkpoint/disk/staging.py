"""A snapshot that is being written, and the steps in which it is committed.

-> ``daemon/saving.py``: parts of all nodes meet here; a save that fails costs only that snapshot.
-> ``disk/tier.py``: begins, finds and sweeps staging directories.
"""

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
    """A snapshot that is being written.

    One process begins and commits it; others may join and add files. A context manager for the
    process that began it: on exit, an uncommitted snapshot is removed.

    Args:
        path: path of the staging directory, two levels below the root.
        at: called at each boundary.
        committed: called with the committed snapshot.

    Attributes:
        step, generation: age that the snapshot gets when it is committed.

    Raises:
        BadInput: if ``path`` has no name of a staging directory.
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
        """The name to give to :meth:`DiskTier.join` in other processes."""
        return self.path.name

    def writer(self, file_name: str) -> PartWriter:
        """Return a writer of a new file. Each process needs another file name.

        Raises:
            FileExistsError: if there is a file of this name.
            OSError: if the disk is full or fails, or the staging directory was removed.
        """
        return PartWriter(DigestedFile(self.path / file_name, self._at))

    def commit(
        self,
        parts: Iterable[Part],
        *,
        world: int = 1,
        keys: Mapping[str, tuple[str | int, ...]] | None = None,
    ) -> Snapshot:
        """Make the snapshot visible, and return it. It survives a loss of power from then on.

        Args:
            parts: the parts of all processes.
            world: number of ranks that trained.
            keys: keys of an item in a nested state dict, by its path.

        Raises:
            OSError: if the disk is full or fails, or there is a snapshot of this name by now. The
                new snapshot does not exist then, unless only the last sync failed.
        """
        all_parts = list(parts)
        manifest = Manifest(
            step=self.step,
            generation=self.generation,
            world=world,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple(entry for part in all_parts for entry in part.files),
            items=tuple(item for part in all_parts for item in part.items),
            keys=dict(keys or {}),
        )
        return self._publish(manifest)

    def _publish(self, manifest: Manifest) -> Snapshot:
        """Write metadata and manifest, and rename the directory, with a sync after each.

        Call ``committed`` with the snapshot, and return it. Raise OSError if the disk is full or
        fails.
        """
        # imported late, because it takes most of a second
        from chaoskit.checkpoint.disk.dcp_metadata import METADATA, encode_metadata

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
        """Remove the staging directory and its files. Has no effect after :meth:`commit`.

        No error is raised: leftovers stay for :meth:`DiskTier.sweep`.
        """
        remove_tree(self.path)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()
