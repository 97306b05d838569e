"""Stored snapshots that are not what was written any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from chaoskit.checkpoint.disk import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.manifest import FILE_CHUNK_BYTES, MANIFEST, Damaged
from chaoskit.checkpoint.snapshot import Snapshot
from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from faults.base import Fault, Target

#: What can be wrong with a snapshot.
HOWS = ("bit", "page", "truncate", "older", "manifest")
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class CorruptFile(Fault):
    """Damage the newest complete snapshot in the run's disk tier. Nobody notices before somebody reads it.

    So it belongs together with a fault that takes every copy in memory, such as ``ReplaceNode`` of every rank: then the
    job goes on from the snapshot before, which costs the steps since that one (``max_lost_steps`` of the run).

    Args:
        rank: who waits meanwhile; the directory is damaged from outside.
        how: ``bit``: one is flipped in the middle of the largest file; ``page``: 4096 bytes there are others;
            ``truncate``: the file ends there; ``older``: a chunk is that of the snapshot before, as after a lost write;
            ``manifest``: a bit is flipped in the table of contents.
    """

    rank: int | str = 0
    how: str = "bit"

    family: ClassVar[str] = "checkpoint"
    effect: ClassVar[str] = "the newest snapshot on disk is not what was written"
    evidence: ClassVar[str] = "bytes that are read back differ from those before, and their digest is wrong"
    stands_for: ClassVar[str] = "disks and file systems that lose or change what they were given"
    unlisted: ClassVar[str] = "the tables count what ends a job; a damaged checkpoint ends none before it is needed"
    impact: ClassVar[str] = "whoever restores sets the snapshot aside, writes that down, and takes the one before"
    undo: ClassVar[str] = "nothing is put back: the snapshot is the run's own, and stays damaged"
    substrates: ClassVar[tuple[str, ...]] = ("local", "netns")
    of_runtime: ClassVar[bool] = True
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, disk={{"target": "/tmp/job", "every_steps": 5}}, faults=[{fault}])'
    )

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")

    def require(self, config: RunConfig) -> None:
        if config.disk is None:
            raise BadInput("disk", config.disk, f"store snapshots: {self.kind} damages one")

    def inject(self, target: Target) -> None:
        assert target.config is not None
        assert target.config.disk is not None
        target.notes["seen"] = damage(DiskTier(target.config.disk.target), self.how)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return target.notes["seen"] or None


def damage(tier: DiskTier, how: str) -> str:
    """Damage the newest snapshot of a tier. What is read back, in words; "" if that is still whole.

    Raises:
        FileNotFoundError: if there is no snapshot, or for ``older`` only one.
    """
    snapshots = tier.snapshots().snapshots
    if len(snapshots) < (2 if how == "older" else 1):
        raise FileNotFoundError(f"{tier.root} has {len(snapshots)} snapshots")
    newest = snapshots[0]
    path = newest.path / (MANIFEST if how == "manifest" else _largest(newest))
    before = path.read_bytes()
    path.write_bytes(_damaged(before, how, snapshots[1].path / path.name if how == "older" else path))
    after = path.read_bytes()
    wrong = tier.verify(Snapshot(newest.path, newest.manifest)) if how != "manifest" else _misread(newest.path)
    if before == after or wrong is None:
        return ""
    changed = sum(map(int.__ne__, before, after)) + abs(len(before) - len(after))
    return f"{changed} of {len(before)} bytes of {newest.name}/{path.name} are not what was written: {wrong}"


def _largest(snapshot: Snapshot) -> str:
    files = [entry for entry in snapshot.manifest.files if entry.name.endswith(DATA_SUFFIX)]
    return max(files, key=lambda entry: entry.size_bytes).name


def _damaged(data: bytes, how: str, older: Path) -> bytes:
    middle = len(data) // 2
    if how == "truncate":
        return data[:middle]
    if how == "older":
        chunk = older.read_bytes()[:FILE_CHUNK_BYTES]
        return chunk + data[len(chunk) :]
    wrong = bytearray(data)
    if how == "page":
        page = wrong[middle : middle + _PAGE_BYTES]
        wrong[middle : middle + _PAGE_BYTES] = bytes(byte ^ 0xFF for byte in page)
    else:
        wrong[middle] ^= 1
    return bytes(wrong)


def _misread(path: Path) -> str | None:
    try:
        Snapshot.open(path)
    except Damaged as error:
        return str(error)
    return None
