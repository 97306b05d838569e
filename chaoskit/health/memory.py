"""The memory of a node: how much can be had, does it keep what is written to it, what has its controller counted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import numpy as np
import psutil
import xxhash

from chaoskit.health.finding import at_least, at_most, bad, good
from chaoskit.health.limits import Limits
from chaoskit.messages import Finding

BUFFER_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
#: Every bit is 0 and 1, and has a neighbour of the other kind.
_PATTERNS = (0x00, 0xFF, 0x55, 0xAA)
_EDAC = Path("/sys/devices/system/edac/mc")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

_MODULE = "have the memory modules examined; see which by the labels in /sys/devices/system/edac"


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``wrong_chunks``: of ``tested_bytes``, the chunks of 1 MiB that did not keep a pattern.

    ``edac_corrected``, ``edac_uncorrected``: of all memory controllers since the boot. None: nobody counts.
    """

    available_bytes: int
    tested_bytes: int = 0
    wrong_chunks: int = 0
    edac_corrected: int | None = None
    edac_uncorrected: int | None = None


def read(buffer_bytes: int = BUFFER_BYTES, edac: Path = _EDAC) -> MemoryReading:
    """Look, and test a buffer: no more than a quarter of what is available, and of whole chunks."""
    available_bytes = _available_bytes()
    chunks = min(buffer_bytes, available_bytes // 4) // _CHUNK_BYTES
    return MemoryReading(
        available_bytes=available_bytes,
        tested_bytes=chunks * _CHUNK_BYTES,
        wrong_chunks=find_wrong(np.empty((chunks, _CHUNK_BYTES), np.uint8)) if chunks else 0,
        edac_corrected=_edac_count(edac, "ce_count"),
        edac_uncorrected=_edac_count(edac, "ue_count"),
    )


def _available_bytes() -> int:
    """Of the machine, or of the control group where that has less."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such controller, or no limit ("max")
            available = min(available, max(0, int(limit.read_text()) - int(usage.read_text())))
    return available


def find_wrong(buffer: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> int:
    """Write patterns and noise to each row of ``buffer`` (chunks, bytes), and count rows that do not keep them.

    A whole pass is written before any of it is read, so that it is memory that is tested, and not the cache.
    """
    wrong: set[int] = set()
    for pattern in _PATTERNS:
        buffer[:] = pattern
        wrong |= _differing(buffer, [xxhash.xxh3_64_intdigest(bytes([pattern]) * buffer.shape[1])] * len(buffer))
    noise = np.random.default_rng(0)
    digests = []
    for chunk in buffer:
        data = noise.bytes(buffer.shape[1])
        digests.append(xxhash.xxh3_64_intdigest(data))
        chunk[:] = np.frombuffer(data, np.uint8)
    return len(wrong | _differing(buffer, digests))


def _differing(buffer: np.ndarray[tuple[int, int], np.dtype[np.uint8]], digests: list[int]) -> set[int]:
    found = (xxhash.xxh3_64_intdigest(chunk.data) for chunk in buffer)
    return {number for number, (one, other) in enumerate(zip(found, digests, strict=True)) if one != other}


def _edac_count(edac: Path, name: str) -> int | None:
    counts = []
    for file in sorted(edac.glob(f"mc[0-9]*/{name}")):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(file.read_text()))
    return sum(counts) if counts else None


def judge(reading: MemoryReading, limits: Limits) -> list[Finding]:
    """Whether there is enough of it, and whether it can be trusted."""
    enough, remedy = limits.memory_available_bytes_min, "end what else runs there, or raise the limit of the container"
    found = [at_least("memory.available_bytes", reading.available_bytes, bad=enough, remedy=remedy)]
    detail = f"{reading.tested_bytes / 2**20:.0f} MiB tested"
    if reading.wrong_chunks:
        text = f"{reading.wrong_chunks} chunks of 1 MiB do not keep what is written to them, {detail}"
        found.append(bad("memory.intact", "no", "keep the node out, and have its memory tested (memtest86+)", text))
    else:
        found.append(good("memory.intact", "yes", detail))
    if reading.edac_uncorrected is not None:
        most = limits.edac_uncorrected_max
        found.append(at_most("memory.edac_uncorrected", reading.edac_uncorrected, bad=most, remedy=_MODULE))
    if reading.edac_corrected is not None:
        warn = limits.edac_corrected_warn
        found.append(at_most("memory.edac_corrected", reading.edac_corrected, warn=warn, remedy=_MODULE))
    return found
