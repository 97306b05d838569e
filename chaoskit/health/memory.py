"""The memory of a node: how much is available, and which errors its controllers have counted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import psutil

from chaoskit.health.finding import at_least, at_most
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import Finding

_EDAC = Path("/sys/devices/system/edac/mc")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)

_MODULE = "have the memory modules examined; see which by the labels in /sys/devices/system/edac"


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``edac_corrected``, ``edac_uncorrected``: of all memory controllers since the boot. None: nothing counts."""

    available_bytes: int
    edac_corrected: int | None = None
    edac_uncorrected: int | None = None


def read(edac: Path = _EDAC) -> MemoryReading:
    """Ask the kernel."""
    return MemoryReading(
        available_bytes=_available_bytes(),
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


def _edac_count(edac: Path, name: str) -> int | None:
    counts = []
    for file in sorted(edac.glob(f"mc[0-9]*/{name}")):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(file.read_text()))
    return sum(counts) if counts else None


def judge(reading: MemoryReading, limits: Limits) -> list[Finding]:
    """Whether there is enough of it, and whether its controllers have counted errors."""
    enough, remedy = (
        limits.memory_available_bytes_min,
        "end what else runs there, or raise the limit of the container",
    )
    found = [at_least("memory.available_bytes", reading.available_bytes, bad=enough, remedy=remedy)]
    if reading.edac_uncorrected is not None:
        most = limits.edac_uncorrected_max
        found.append(
            at_most("memory.edac_uncorrected", reading.edac_uncorrected, bad=most, remedy=_MODULE)
        )
    if reading.edac_corrected is not None:
        warn = limits.edac_corrected_warn
        found.append(
            at_most("memory.edac_corrected", reading.edac_corrected, warn=warn, remedy=_MODULE)
        )
    return found
