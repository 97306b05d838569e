"""Disk tier: a directory of snapshots, each of them complete or invisible at every instant.

Any number of processes write a snapshot into a staging directory; one of them commits it. The files
are on the disk before the manifest, and the manifest before the rename that makes the snapshot
visible. To delete a snapshot, it is renamed first. Each visible directory is thus complete at any
instant. Leftovers of a dead process are invisible, and recognised by its id.

-> ``daemon/saving.py``: which node of a job writes which part, and a save that fails.
-> ``disk/retention.py``: which snapshots :meth:`DiskTier.prune` deletes.
-> ``runtime/state/from_store.py``: restores in a job, which quarantine what is damaged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from chaoskit.checkpoint.disk.files import make_directory, remove_tree, sync_directory
from chaoskit.checkpoint.disk.inventory import (
    DamagedSnapshot,
    FoundSnapshot,
    Listing,
    NothingToRestore,
)
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

#: A writer on another host, which cannot be seen, is taken for dead when it has written nothing for
#: so long.
_FOREIGN_LEASE_S = 86400.0
REASON = "REASON.txt"
#: Suffix of files with tensors, as torch names them.
DATA_SUFFIX = ".distcp"


class DiskTier:
    """A tier that writes, lists, verifies and deletes snapshots below ``root``.

    The directory may be on any file system that all writers share.

    Args:
        root: directory, made by the first save if it is missing.
        retention: rule for :meth:`prune`; None for the defaults of :class:`Retention`.
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.BOUNDARIES`.

    Raises:
        BadInput: if an argument is of another type.
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
        self._verified_ages: set[tuple[int, int]] = set()
        # age of the snapshot stored last, maybe not the newest
        self._last_stored_age: tuple[int, int] | None = None

    # -- writing -----------------------------------------------------------------------------------

    def begin(self, step: int, generation: int | None = None, *, run: str = "") -> Staging:
        """Make the staging directory of a new snapshot, and return a handle to it.

        Leftovers of dead processes are removed first.

        Args:
            step: number of committed steps.
            generation: generation that committed the last of them; None for the first free number.
            run: hexadecimal id of the run whose processes write it, for :meth:`begun`; "" for none.

        Raises:
            BadInput: if the snapshot exists, or a number is negative.
            OSError: if the disk is full or fails.
        """
        if step < 0 or (generation or 0) < 0:
            raise BadInput("step", (step, generation), "use 0 or more")
        self.sweep()
        if generation is None:
            generation = self.free_generation(step)
        elif (step, generation) in self._names_by_age():
            raise BadInput(
                "generation",
                generation,
                f"use another number: {snapshot_name(step, generation)} exists",
            )
        self.at("stage")
        make_directory(self.root / STAGING)
        path = self.root / STAGING / Owner.this().staging_name(snapshot_name(step, generation), run)
        path.mkdir()
        return Staging(path, self.at, self._note_commit)

    def free_generation(self, step: int) -> int:
        """Return the first number above the generations of all snapshots of ``step``.

        It is 0 if there is none.
        """
        generations = [number for stored, number in self._names_by_age() if stored == step]
        return max(generations, default=-1) + 1

    def begun(self, run: str) -> list[Path]:
        """Return the staging directories of a run, the one changed last at the end.

        Several may be of one snapshot, if a process of the run died on another host and a second
        one began the snapshot again.
        """
        return sorted((self.root / STAGING).glob(f"*~*-{run}"), key=_changed_ns)

    def join(self, name: str) -> Staging:
        """Return a handle to a snapshot that another process began.

        Args:
            name: name of the staging directory, which is :attr:`Staging.name` in that process.

        Raises:
            BadInput: if this is no name of a staging directory. Existence is not checked.
        """
        return Staging(self.root / STAGING / name, self.at, self._note_commit)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, bytes] | None = None,
        *,
        generation: int | None = None,
    ) -> Snapshot:
        """Store and commit the state of a single process; for several, see :meth:`begin`.

        Return the committed snapshot. A failed save leaves nothing, unless only the last sync
        failed; see :meth:`Staging.commit`. Old snapshots stay until :meth:`prune`.

        Args:
            step: number of committed steps.
            tensors: the tensors by path, each whole.
            objects: further serialised objects by path.
            generation: as in :meth:`begin`.

        Raises:
            BadInput: if the snapshot exists, a number is negative, or a tensor has no dense bytes.
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
        """Count a snapshot that was just written as verified, and exclude it from :meth:`prune`.

        The one that was excluded before may be deleted again.
        """
        self._last_stored_age = snapshot.manifest.age
        self._verified_ages.add(snapshot.manifest.age)

    # -- reading -----------------------------------------------------------------------------------

    def snapshots(self) -> Listing:
        """Return all snapshots, the newest first. Manifests are read, data files are not.

        Snapshots that are being written, or are in quarantine, are left out.

        Raises:
            OSError: if a manifest exists and cannot be read.
        """
        listing = Listing([], [])
        for age, name in sorted(self._names_by_age().items(), reverse=True):
            path = self.root / name
            try:
                snapshot = Snapshot.open(path)
                if snapshot.manifest.age != age:
                    raise Damaged(f"its manifest names {snapshot_name(*snapshot.manifest.age)}")
                listing.snapshots.append(snapshot)
            except Damaged as error:
                if path.exists():  # otherwise it was pruned meanwhile
                    listing.damaged.append(DamagedSnapshot(name, path, str(error)))
        return listing

    def holds(self, step: int) -> bool:
        """Return True if there is a snapshot of ``step``. Only names are read."""
        return any(stored == step for stored, _ in self._names_by_age())

    def newest_step(self) -> int:
        """Return the largest step of all snapshots, or -1 without one.

        Only names are read, so damaged snapshots count.
        """
        return max((step for step, _ in self._names_by_age()), default=-1)

    def staged_bytes(self, step: int) -> int:
        """Return the size in bytes of all data written so far for incomplete snapshots of ``step``.

        Those of other runs and of dead processes count, too.
        """
        written = 0
        for staging in _paths_in(self.root / STAGING):
            age = parse_name(staging.name.partition("~")[0])
            for path in _paths_in(staging) if age is not None and age[0] == step else []:
                with contextlib.suppress(FileNotFoundError):
                    written += path.stat().st_size
        return written

    def newest_verified(self) -> FoundSnapshot:
        """Return the newest undamaged snapshot, and those as new or newer that were quarantined.

        Snapshots are read and verified, the newest first, until one is undamaged. Those with a
        damaged manifest are all quarantined, older ones too. For tools and tests: in a job, the
        coordinator chooses the snapshot.

        Raises:
            NothingToRestore: if there is none.
            OSError: if a file cannot be opened or read, or a snapshot cannot be moved.
        """
        listing = self.snapshots()
        lost = [self.quarantine(damaged.path, damaged.reason) for damaged in listing.damaged]
        for snapshot in listing.snapshots:
            if (damage := self.verify(snapshot)) is None:
                newer = [damaged for damaged in lost if damaged.step >= snapshot.manifest.step]
                return FoundSnapshot(snapshot, newer)
            lost.append(self.quarantine(snapshot.path, damage))
        raise NothingToRestore(self.root, lost)

    def verify(self, snapshot: Snapshot) -> str | None:
        """Read all of a snapshot. Return a description of its damage, or None.

        The result is remembered for :meth:`prune`. The snapshot is not quarantined.

        Raises:
            OSError: as :meth:`Snapshot.verify` does.
        """
        try:
            snapshot.verify()
        except Damaged as error:
            self._verified_ages.discard(snapshot.manifest.age)
            return str(error)
        self._verified_ages.add(snapshot.manifest.age)
        return None

    def quarantine(self, path: Path, reason: str) -> DamagedSnapshot:
        """Move a snapshot to quarantine, with a note of the reason, and return its description.

        It is not deleted and not offered again. If another process has moved or deleted it, the
        description has the old path.

        Raises:
            OSError: if it cannot be moved.
        """
        target = self.root / QUARANTINE / unique(path.name)
        target.parent.mkdir(exist_ok=True)
        if (age := parse_name(path.name)) is not None:
            self._verified_ages.discard(age)
        try:
            path.rename(target)
        except FileNotFoundError:
            return DamagedSnapshot(path.name, path, f"{reason}; it was deleted meanwhile")
        with contextlib.suppress(OSError):  # a full disk must not fail the quarantine
            (target / REASON).write_text(f"{reason}\n", encoding="utf-8")
        for directory in (self.root, target.parent):
            sync_directory(directory)
        return DamagedSnapshot(path.name, target, reason)

    # -- deletion ----------------------------------------------------------------------------------

    def prune(self) -> list[str]:
        """Delete the snapshots that the retention does not keep.

        Return their names, the oldest first. The snapshot that this tier stored last stays:
        training may have gone back behind the newest one. If any is to be deleted and none is
        verified yet, snapshots are verified until one is undamaged. Nothing is deleted if all are
        damaged.

        Raises:
            OSError: if the disk fails. Some of them may be deleted then.
        """
        doomed = self.doomed()
        for snapshot in doomed:
            self._delete(snapshot.path)
        return [snapshot.name for snapshot in doomed]

    def doomed(self) -> list[Snapshot]:
        """Return the snapshots that :meth:`prune` would delete, the oldest first.

        Data is read only to find an undamaged snapshot; see :meth:`prune`.
        """
        snapshots = self.snapshots().snapshots
        present = {
            Kept(*snapshot.manifest.age, snapshot.manifest.size_bytes): snapshot
            for snapshot in snapshots
        }
        if not self.retention.doomed(present, self._verified_ages):
            return []
        if not any(kept.age in self._verified_ages for kept in present):
            undamaged = (snapshot for snapshot in snapshots if self.verify(snapshot) is None)
            if next(undamaged, None) is None:
                return []
        doomed = self.retention.doomed(present, self._verified_ages)
        return [present[kept] for kept in doomed if kept.age != self._last_stored_age]

    def _delete(self, path: Path) -> None:
        """Rename a snapshot into the trash, and delete it there."""
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
        """Remove leftovers of dead processes, and everything in the trash.

        Return the names of the staging directories among them. A writer on another host counts as
        dead once it has written nothing for a day.
        """
        removed = []
        for path in _paths_in(self.root / TRASH):
            remove_tree(path)
        for path in _paths_in(self.root / STAGING):
            owner = owner_of(path.name)
            if (
                owner is None
                or owner.is_alive
                or (owner.is_alive is None and _written_lately(path))
            ):
                continue
            remove_tree(path)
            removed.append(path.name)
        return removed

    def _names_by_age(self) -> dict[tuple[int, int], str]:
        """Return the names of all snapshots by step and generation."""
        ages = {path.name: parse_name(path.name) for path in _paths_in(self.root)}
        return {age: name for name, age in ages.items() if age is not None}


def _paths_in(directory: Path) -> list[Path]:
    """Return the paths in a directory, sorted; [] if there is no such directory."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_ns(path: Path) -> int:
    """Return the time of the last change in a directory; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _written_lately(path: Path) -> bool:
    """Return True if the directory changed within the lease of a writer that cannot be seen."""
    newest_s = 0.0
    for changed in (path, *_paths_in(path)):
        with contextlib.suppress(FileNotFoundError):
            newest_s = max(newest_s, changed.stat().st_mtime)
    return time.time() - newest_s < _FOREIGN_LEASE_S
