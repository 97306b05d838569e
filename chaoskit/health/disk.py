"""The disk on which a node writes: is there room, does it take a write, and does it give back what it took."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec
import xxhash

from chaoskit.health.finding import at_least, at_most, bad, good
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import Finding

PROBE_BYTES = 2**20

_ROOM = "remove what is not needed, or choose another directory"
_SLOW = "look at what else writes there (iostat -x), and at the disk's own log (smartctl -a)"


class DiskReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``error``: why the probe could not be written, synced or read back; then it took no time.

    ``write_ms``: of ``PROBE_BYTES`` with fsync; ``read_ms``: of the same, not from the page cache where that can be
    left out. ``inodes`` 0: the file system does not count any.
    """

    path: str
    read_only: bool = False
    free_bytes: int = 0
    size_bytes: int = 0
    free_inodes: int = 0
    inodes: int = 0
    write_ms: float = 0.0
    read_ms: float = 0.0
    intact: bool = True
    error: str = ""


def read(directory: Path, size_bytes: int = PROBE_BYTES) -> DiskReading:
    """Try the file system of ``directory``; the file for it is gone when this returns."""
    path = str(directory)
    try:
        state = os.statvfs(directory)
    except OSError as error:
        return DiskReading(path=path, error=error.strerror or str(error))
    known = DiskReading(
        path=path,
        read_only=bool(state.f_flag & os.ST_RDONLY),
        free_bytes=state.f_bavail * state.f_frsize,
        size_bytes=state.f_blocks * state.f_frsize,
        free_inodes=state.f_favail,
        inodes=state.f_files,
    )
    if known.read_only:
        return known
    try:
        write_ms, read_ms, intact = _write_and_read(directory, size_bytes)
    except OSError as error:
        return msgspec.structs.replace(known, error=error.strerror or str(error))
    return msgspec.structs.replace(known, write_ms=write_ms, read_ms=read_ms, intact=intact)


def _write_and_read(directory: Path, size_bytes: int) -> tuple[float, float, bool]:
    data = os.urandom(
        size_bytes
    )  # a file system that compresses or leaves zeros out has to store this
    with tempfile.TemporaryFile(
        dir=directory, buffering=0
    ) as file:  # without a name: nothing is left of it
        began_s = time.monotonic()
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
        written_s = time.monotonic()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        digest, size = xxhash.xxh3_128(), 0
        while piece := file.read(size_bytes):
            digest.update(piece)
            size += len(piece)
        read_s = time.monotonic()
    intact = size == size_bytes and digest.digest() == xxhash.xxh3_128_digest(data)
    return (written_s - began_s) * 1e3, (read_s - written_s) * 1e3, intact


def judge(reading: DiskReading, limits: Limits) -> list[Finding]:
    """Whether a node can keep journals, logs and snapshots there."""
    if reading.read_only:
        remedy = "see why it was mounted read-only (dmesg: the kernel does so after errors), and mount it again"
        return [bad("disk.writable", "no", remedy, f"{reading.path} is mounted read-only")]
    if reading.error and not reading.size_bytes:
        return [
            bad(
                "disk.writable",
                "no",
                "name a directory that can be written",
                f"{reading.path}: {reading.error}",
            )
        ]
    share = reading.free_bytes / max(1, reading.size_bytes)
    found = [
        at_least(
            "disk.free_bytes", reading.free_bytes, bad=limits.disk_free_bytes_min, remedy=_ROOM
        ),
        at_least("disk.free_share", share, warn=limits.disk_free_share_warn, remedy=_ROOM),
    ]
    if reading.inodes:
        found.append(
            at_least(
                "disk.free_inodes",
                reading.free_inodes,
                bad=limits.disk_free_inodes_min,
                remedy=_ROOM,
            )
        )
    if reading.error:
        remedy = "look at the kernel's log (dmesg) and at the quota"
        return [*found, bad("disk.writable", "no", remedy, f"{reading.path}: {reading.error}")]
    found.append(good("disk.writable", "yes", reading.path))
    warn, most = limits.disk_write_warn_ms, limits.disk_write_max_ms
    found.append(at_most("disk.write_ms", reading.write_ms, warn=warn, bad=most, remedy=_SLOW))
    found.append(at_most("disk.read_ms", reading.read_ms, warn=warn, bad=most, remedy=_SLOW))
    if reading.intact:
        return [*found, good("disk.intact", "yes")]
    return [
        *found,
        bad("disk.intact", "no", "replace the disk", "what was read is not what was written"),
    ]
