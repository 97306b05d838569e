"""Damage of the files of a complete snapshot, as a disk may cause it.

-> faults/storage/stored.py: the fault that does it.
-> checkpoint/disk/tier.py: what a restore does with a damaged snapshot (``quarantine``).
"""

from __future__ import annotations

from pathlib import Path

from chaoskit.checkpoint.disk.snapshot import Snapshot
from chaoskit.checkpoint.disk.tier import DATA_SUFFIX, DiskTier
from chaoskit.checkpoint.layout.manifest import FILE_CHUNK_BYTES, MANIFEST, Damaged

_PAGE_BYTES = 4096


def damage(root: Path, how: str) -> str:
    """Damage the newest snapshot of the disk tier at ``root``.

    Return a description of what is read back; "" if the snapshot is still intact.

    Args:
        root: directory of the disk tier.
        how: kind of damage, as :class:`faults.storage.stored.CorruptFile` lists them.

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
        _damaged_content(before, how, snapshots[1].path / path.name if how == "older" else path)
    )
    after = path.read_bytes()
    error = (
        tier.verify(Snapshot(newest.path, newest.manifest))
        if how != "manifest"
        else _open_error(newest.path)
    )
    if before == after or error is None:
        return ""
    changed = sum(map(int.__ne__, before, after)) + abs(len(before) - len(after))
    return f"{changed} of {len(before)} bytes of {newest.name}/{path.name} are not what was written: {error}"


def _largest(snapshot: Snapshot) -> str:
    """Return the name of the largest data file of a snapshot."""
    files = [file for file in snapshot.manifest.files if file.name.endswith(DATA_SUFFIX)]
    return max(files, key=lambda file: file.size_bytes).name


def _damaged_content(data: bytes, how: str, older: Path) -> bytes:
    """Return the content of a file with a damage of this kind.

    ``older`` is the file of an older snapshot, from which ``how="older"`` takes the beginning.
    """
    middle = len(data) // 2
    if how == "truncate":
        return data[:middle]
    if how == "older":
        chunk = older.read_bytes()[:FILE_CHUNK_BYTES]
        return chunk + data[len(chunk) :]
    damaged = bytearray(data)
    if how == "page":
        page = damaged[middle : middle + _PAGE_BYTES]
        damaged[middle : middle + _PAGE_BYTES] = bytes(byte ^ 0xFF for byte in page)
    else:
        damaged[middle] ^= 1
    return bytes(damaged)


def _open_error(path: Path) -> str | None:
    """Return the error with which a damaged snapshot is opened; None if it opens."""
    try:
        Snapshot.open(path)
    except Damaged as error:
        return str(error)
    return None
