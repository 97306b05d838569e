"""What a disk may do to a complete snapshot, done to its files."""

from __future__ import annotations

from pathlib import Path

from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.tier import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, MANIFEST, Damaged

_PAGE_BYTES = 4096


def damage(root: Path, how: str) -> str:
    """Damage the newest snapshot of the disk tier at ``root``. What is read back, in words; "" if that is still whole.

    Raises:
        FileNotFoundError: if there is no snapshot, or for ``older`` only one.
    """
    tier = DiskTier(root)
    snapshots = tier.snapshots().snapshots
    if len(snapshots) < (2 if how == "older" else 1):
        raise FileNotFoundError(f"{tier.root} has {len(snapshots)} snapshots")
    newest = snapshots[0]
    path = newest.path / (MANIFEST if how == "manifest" else _largest(newest))
    before = path.read_bytes()
    path.write_bytes(
        _damaged(before, how, snapshots[1].path / path.name if how == "older" else path)
    )
    after = path.read_bytes()
    wrong = (
        tier.verify(Snapshot(newest.path, newest.manifest))
        if how != "manifest"
        else _misread(newest.path)
    )
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
