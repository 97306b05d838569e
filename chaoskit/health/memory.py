"""Probe of the memory of a node: available bytes, and errors that its controllers have counted.

-> ``health/gpu.py``: the memory of GPUs. ``health/compute.py``: wrong results of a computation.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import psutil

from chaoskit.health.finding import at_least, at_most
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import Finding

_EDAC = Path("/sys/devices/system/edac/mc")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)

_MODULE_REMEDY = "have the memory modules examined; /sys/devices/system/edac has their labels"


class MemoryReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reading of the memory.

    Attributes:
        available_bytes: memory that processes may still take.
        edac_corrected, edac_uncorrected: errors of all memory controllers since the boot; None if
            no controller counts them.
    """

    available_bytes: int
    edac_corrected: int | None = None
    edac_uncorrected: int | None = None


def read(edac: Path = _EDAC) -> MemoryReading:
    """Return a reading of the memory: available bytes, and the kernel's counts of errors.

    Args:
        edac: directory with the kernel's counters of memory controllers.
    """
    return MemoryReading(
        available_bytes=_available_bytes(),
        edac_corrected=_edac_count(edac, "ce_count"),
        edac_uncorrected=_edac_count(edac, "ue_count"),
    )


def _available_bytes() -> int:
    """Return the available bytes of the machine, or of the control group if that has fewer."""
    available = int(psutil.virtual_memory().available)
    for limit, usage in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such controller, or no limit ("max")
            available = min(available, max(0, int(limit.read_text()) - int(usage.read_text())))
    return available


def _edac_count(edac: Path, name: str) -> int | None:
    """Return the sum of a counter over all memory controllers; None if no controller has it."""
    counts = []
    for file in sorted(edac.glob(f"mc[0-9]*/{name}")):
        with contextlib.suppress(OSError, ValueError):
            counts.append(int(file.read_text()))
    return sum(counts) if counts else None


def judge(reading: MemoryReading, limits: HealthLimits) -> list[Finding]:
    """Return the findings on the available memory, and on errors of the controllers.

    Too little memory and uncorrected errors are bad; corrected errors are a warning.
    """
    min_bytes, remedy = (
        limits.memory_available_bytes_min,
        "end other processes on the node, or raise the memory limit of the container",
    )
    findings = [
        at_least("memory.available_bytes", reading.available_bytes, bad=min_bytes, remedy=remedy)
    ]
    if reading.edac_uncorrected is not None:
        most = limits.edac_uncorrected_max
        findings.append(
            at_most(
                "memory.edac_uncorrected", reading.edac_uncorrected, bad=most, remedy=_MODULE_REMEDY
            )
        )
    if reading.edac_corrected is not None:
        warn = limits.edac_corrected_warn
        findings.append(
            at_most(
                "memory.edac_corrected", reading.edac_corrected, warn=warn, remedy=_MODULE_REMEDY
            )
        )
    return findings
