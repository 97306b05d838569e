"""The disk tier: a directory of snapshots, each of them complete or invisible whatever happens at whatever instant.

A snapshot is written into a staging directory by any number of processes; one of them commits. Its files are on the
disk before its manifest, and that before the rename that makes it visible. One that is deleted is renamed first. So at
any instant each visible directory is complete; what a dead process left behind is invisible and recognised as its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from chaoskit.checkpoint.disk.files import make_directory, remove_tree, sync_directory
from chaoskit.checkpoint.disk.inventory import DamagedSnapshot, Found, Listing, NothingToRestore
from chaoskit.checkpoint.disk.names import (
    QUARANTINE,
    STAGING,
    TRASH,
    Owner,
    owner_of,
    parse_name,
    snapshot_name,
    unique,
)
from chaoskit.checkpoint.disk.retention import Kept, Retention
from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.staging import Staging
from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.errors import BadInput
from chaoskit.typed import typed_arguments

#: A writer on another host, which cannot be seen from here, is given up when it has written nothing for so long.
_FOREIGN_LEASE_S = 86400.0
REASON = "REASON.txt"
#: Of files with tensors; torch's own.
DATA_SUFFIX = ".distcp"


class DiskTier:
    """Snapshots below ``root``, on any file system that all their writers share.

    Args:
        root: made if it is missing, by the first save.
        retention: what :meth:`prune` leaves.
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.BOUNDARIES`.
    """

    name = "disk"

    @typed_arguments
    def __init__(
        self,
        root: Path | str,
        *,
        retention: Retention | None = None,
        at: Hook = undisturbed,
    ) -> None:
        self.root = Path(root)
        self.retention, self.at = retention or Retention(), at
        self._verified: set[tuple[int, int]] = set()
        self._written: tuple[int, int] | None = (
            None  # the snapshot that was stored last, which may not be the newest
        )

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self, step: int, generation: int | None = None, *, run: str = "") -> Staging:
        """Begin a snapshot, after removing what dead processes left of theirs.

        Args:
            step: committed steps.
            generation: the membership that committed the last of them. None: the first number that is free.
            run: hexadecimal id of the run whose processes write it, for :meth:`begun`.

        Raises:
            BadInput: if there is that snapshot.
            OSError: if the disk is full or fails.
        """
        if step < 0 or (generation or 0) < 0:
            raise BadInput("step", (step, generation), "use 0 or more")
        self.sweep()
        if generation is None:
            generation = self.free_generation(step)
        elif (step, generation) in self._names():
            raise BadInput(
                "generation", generation, f"use another: {snapshot_name(step, generation)} is there"
            )
        self.at("stage")
        make_directory(self.root / STAGING)
        path = self.root / STAGING / Owner.this().staging_name(snapshot_name(step, generation), run)
        path.mkdir()
        return Staging(path, self.at, self._note_commit)

    def free_generation(self, step: int) -> int:
        """Return the first number above those of the snapshots of ``step``."""
        return max((number for taken, number in self._names() if taken == step), default=-1) + 1

    def begun(self, run: str) -> list[Path]:
        """What processes of ``run`` have begun: a run that died on another host may have left the same snapshot."""
        return sorted((self.root / STAGING).glob(f"*~*-{run}"), key=_changed_ns)

    def join(self, name: str) -> Staging:
        """Take part in a snapshot that another process began."""
        return Staging(self.root / STAGING / name, self.at, self._note_commit)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, bytes] | None = None,
        *,
        generation: int | None = None,
    ) -> Snapshot:
        """Store the state of a single process; for several, see :meth:`begin`. A save that fails leaves nothing behind.

        Raises:
            OSError: if the disk is full or fails.
        """
        with self.begin(step, generation) as staging:
            with staging.writer(f"__0_0{DATA_SUFFIX}") as writer:
                for path, tensor in tensors.items():
                    writer.add_tensor(path, tensor)
                for path, data in (objects or {}).items():
                    writer.add_object(path, data)
                part = writer.finish()
            return staging.commit([part])

    def _note_commit(self, snapshot: Snapshot) -> None:
        """Remember a snapshot that was written just now: it is whole, and no retention deletes it yet."""
        self._written = snapshot.manifest.age
        self._verified.add(snapshot.manifest.age)

    # -- reading --------------------------------------------------------------------------------------------------

    def snapshots(self) -> Listing:
        """What is there. Manifests are read, data files are not."""
        listing = Listing([], [])
        for age, name in sorted(self._names().items(), reverse=True):
            path = self.root / name
            try:
                snapshot = Snapshot.open(path)
                if snapshot.manifest.age != age:
                    raise Damaged(f"its manifest is of {snapshot_name(*snapshot.manifest.age)}")
                listing.snapshots.append(snapshot)
            except Damaged as error:
                if path.exists():  # else it was pruned since
                    listing.damaged.append(DamagedSnapshot(name, path, str(error)))
        return listing

    def holds(self, step: int) -> bool:
        """Whether a snapshot of ``step`` is there. Nothing of it is read."""
        return any(known == step for known, _ in self._names())

    def newest_step(self) -> int:
        """Return the furthest step of which a snapshot is there; -1 without one. Nothing of it is read."""
        return max((step for step, _ in self._names()), default=-1)

    def staged_bytes(self, step: int) -> int:
        """What is written so far of snapshots of ``step`` that are not complete yet."""
        written = 0
        for staging in _entries(self.root / STAGING):
            age = parse_name(staging.name.partition("~")[0])
            for path in _entries(staging) if age is not None and age[0] == step else []:
                with contextlib.suppress(FileNotFoundError):
                    written += path.stat().st_size
        return written

    def newest_verified(self) -> Found:
        """The newest snapshot all of whose bytes are what was written. Newer ones that are not are quarantined.

        Raises:
            NothingToRestore: if there is none.
        """
        listing = self.snapshots()
        lost = [self.quarantine(one.path, one.reason) for one in listing.damaged]
        for snapshot in listing.snapshots:
            if (damage := self.verify(snapshot)) is None:
                newer = [one for one in lost if one.step >= snapshot.manifest.step]
                return Found(snapshot, newer)
            lost.append(self.quarantine(snapshot.path, damage))
        raise NothingToRestore(self.root, lost)

    def verify(self, snapshot: Snapshot) -> str | None:
        """Read all of a snapshot. What is wrong with it; None if nothing is."""
        try:
            snapshot.verify()
        except Damaged as error:
            self._verified.discard(snapshot.manifest.age)
            return str(error)
        self._verified.add(snapshot.manifest.age)
        return None

    def quarantine(self, path: Path, reason: str) -> DamagedSnapshot:
        """Set a snapshot aside, with a note why. Nothing of it is deleted, and it is not offered again."""
        target = self.root / QUARANTINE / unique(path.name)
        target.parent.mkdir(exist_ok=True)
        if (age := parse_name(path.name)) is not None:
            self._verified.discard(age)
        try:
            path.rename(target)
        except FileNotFoundError:
            return DamagedSnapshot(path.name, path, f"{reason}; it was deleted meanwhile")
        with contextlib.suppress(OSError):  # a full disk is no reason to offer it again
            (target / REASON).write_text(f"{reason}\n", encoding="utf-8")
        for directory in (self.root, target.parent):
            sync_directory(directory)
        return DamagedSnapshot(path.name, target, reason)

    # -- taking away ----------------------------------------------------------------------------------------------

    def prune(self) -> list[str]:
        """Delete what the retention does not keep; returns the names, the oldest first.

        The snapshot that this tier stored last stays: training may have gone back behind the newest one. If nothing is
        known to be whole yet, snapshots are verified until one is: the last good one is never deleted.
        """
        doomed = self.doomed()
        for snapshot in doomed:
            self._delete(snapshot.path)
        return [snapshot.name for snapshot in doomed]

    def doomed(self) -> list[Snapshot]:
        """What :meth:`prune` would delete."""
        snapshots = self.snapshots().snapshots
        present = {
            Kept(*snapshot.manifest.age, snapshot.manifest.size_bytes): snapshot
            for snapshot in snapshots
        }
        if not self.retention.doomed(present, self._verified):
            return []
        if not any(kept.age in self._verified for kept in present):
            whole = (snapshot for snapshot in snapshots if self.verify(snapshot) is None)
            if next(whole, None) is None:
                return []
        doomed = self.retention.doomed(present, self._verified)
        return [present[kept] for kept in doomed if kept.age != self._written]

    def _delete(self, path: Path) -> None:
        self.at("prune")
        target = self.root / TRASH / unique(path.name)
        target.parent.mkdir(exist_ok=True)
        try:
            path.rename(target)
        except FileNotFoundError:
            return  # another process was faster
        sync_directory(self.root)
        self.at("delete")
        remove_tree(target)
        self.at("pruned")

    def sweep(self) -> list[str]:
        """Remove what processes that are gone had begun to write or to delete; returns the names of the former."""
        removed = []
        for path in _entries(self.root / TRASH):
            remove_tree(path)
        for path in _entries(self.root / STAGING):
            owner = owner_of(path.name)
            if owner is None or owner.lives or (owner.lives is None and _written_lately(path)):
                continue
            remove_tree(path)
            removed.append(path.name)
        return removed

    def _names(self) -> dict[tuple[int, int], str]:
        ages = {path.name: parse_name(path.name) for path in _entries(self.root)}
        return {age: name for name, age in ages.items() if age is not None}


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_ns(path: Path) -> int:
    """When something was last put into a directory; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _written_lately(path: Path) -> bool:
    """Whether something in the directory changed within the lease of a writer that cannot be seen."""
    newest_s = 0.0
    for one in (path, *_entries(path)):
        with contextlib.suppress(FileNotFoundError):
            newest_s = max(newest_s, one.stat().st_mtime)
    return time.time() - newest_s < _FOREIGN_LEASE_S
