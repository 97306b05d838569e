"""Probe of the disk to which a node writes: free space, and a write that is read back.

-> ``health/limits.py``: the limits. ``daemon/saving.py``: what a job does when the disk is full.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec
import xxhash

from chaoskit.health.finding import at_least, at_most, bad, good
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import Finding

PROBE_BYTES = 2**20

_ROOM_REMEDY = "remove files that are not needed, or choose another directory"
_SLOW_REMEDY = "check for other writers (iostat -x), and the disk's own log (smartctl -a)"


class DiskReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reading of a file system.

    Attributes:
        path: directory in which the probe was written.
        read_only: True if the file system is mounted read-only; nothing is written then.
        free_bytes: space that this user may still take.
        size_bytes: size of the file system.
        free_inodes: inodes for this user.
        inodes: number of all inodes; 0 if the file system does not count any.
        write_ms: time of a write of the probe with fsync.
        read_ms: time to read it back, not from the page cache if that can be avoided.
        intact: False if other bytes were read back than were written.
        error: reason why the file system could not be examined, or the probe not be written, synced
            or read back. The times are 0 then. "" without an error.
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
    """Write a probe of ``size_bytes`` in ``directory``, read it back, and return the reading.

    No file is left. An error of the disk is not raised: the reading has it.
    """
    path = str(directory)
    try:
        volume = os.statvfs(directory)
    except OSError as error:
        return DiskReading(path=path, error=error.strerror or str(error))
    reading = DiskReading(
        path=path,
        read_only=bool(volume.f_flag & os.ST_RDONLY),
        free_bytes=volume.f_bavail * volume.f_frsize,
        size_bytes=volume.f_blocks * volume.f_frsize,
        free_inodes=volume.f_favail,
        inodes=volume.f_files,
    )
    if reading.read_only:
        return reading
    try:
        write_ms, read_ms, intact = _write_and_read(directory, size_bytes)
    except OSError as error:
        return msgspec.structs.replace(reading, error=error.strerror or str(error))
    return msgspec.structs.replace(reading, write_ms=write_ms, read_ms=read_ms, intact=intact)


def _write_and_read(directory: Path, size_bytes: int) -> tuple[float, float, bool]:
    """Return the times to write and to read a probe, in ms, and True if the bytes are the same.

    Raise OSError if the disk fails.
    """
    data = os.urandom(size_bytes)  # a file system that compresses must store all of it
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:  # has no name: no file remains
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


def judge(reading: DiskReading, limits: HealthLimits) -> list[Finding]:
    """Return the findings on a disk for journals, logs and snapshots.

    A disk is bad if it cannot be written, is nearly full or very slow, or returns other bytes. A
    disk that is somewhat full or slow is a warning.
    """
    if reading.read_only:
        remedy = "find the cause (dmesg: the kernel does so after errors), and mount it for writing"
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
    free_fraction = reading.free_bytes / max(1, reading.size_bytes)
    findings = [
        at_least(
            "disk.free_bytes",
            reading.free_bytes,
            bad=limits.disk_free_bytes_min,
            remedy=_ROOM_REMEDY,
        ),
        at_least(
            "disk.free_share",
            free_fraction,
            warn=limits.disk_free_share_warn,
            remedy=_ROOM_REMEDY,
        ),
    ]
    if reading.inodes:
        findings.append(
            at_least(
                "disk.free_inodes",
                reading.free_inodes,
                bad=limits.disk_free_inodes_min,
                remedy=_ROOM_REMEDY,
            )
        )
    if reading.error:
        remedy = "check the kernel's log (dmesg) and the quota"
        return [*findings, bad("disk.writable", "no", remedy, f"{reading.path}: {reading.error}")]
    findings.append(good("disk.writable", "yes", reading.path))
    warn_ms, max_ms = limits.disk_write_warn_ms, limits.disk_write_max_ms
    findings.append(
        at_most("disk.write_ms", reading.write_ms, warn=warn_ms, bad=max_ms, remedy=_SLOW_REMEDY)
    )
    findings.append(
        at_most("disk.read_ms", reading.read_ms, warn=warn_ms, bad=max_ms, remedy=_SLOW_REMEDY)
    )
    if reading.intact:
        return [*findings, good("disk.intact", "yes")]
    return [
        *findings,
        bad("disk.intact", "no", "replace the disk", "other bytes were read than were written"),
    ]
