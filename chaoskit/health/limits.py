"""Limits of all probes, with defaults; ``--limit NAME=VALUE`` of ``chaoskit node check`` sets one.

-> ``docs/health.md``: the source of each limit. ``health/finding.py``: compares a value with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from chaoskit.errors import BadInput, closest_name

_MB = 10**6


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of good values, by field.

    Values beyond ``_warn`` deserve a warning; those beyond ``_max`` or ``_min`` are bad.
    docs/health.md has the source of each limit.

    Args:
        gpus_expected: number of GPUs that this node should have; 0 for any number.
        gpu_temperature_max_c: limit for GPUs that do not report their own slowdown temperature.
        gpu_temperature_margin_c: distance from the slowdown temperature below which a warning is
            given.
        ecc_uncorrected_volatile_max: uncorrected errors since the driver was loaded.
        ecc_uncorrected_aggregate_warn: uncorrected errors over the life of the GPU.
        retired_pages_max: retired pages of GPUs before Ampere.
        clock_offset_warn_ms, clock_offset_max_ms: offset from the clock of another node.
        clock_step_warn_ms: jump of the wall clock while it is watched.
        disk_free_bytes_min, disk_free_share_warn, disk_free_inodes_min: free space of the file
            system of the run directory, in bytes, as a fraction of its size, and in inodes.
        disk_write_warn_ms, disk_write_max_ms: time of a small write with fsync.
        memory_available_bytes_min: memory that must be available; raise it to the need of a worker.
        edac_corrected_warn, edac_uncorrected_max: errors that the memory controllers have counted
            since the boot.
        compute_warn_ms: time of the fixed computation, which takes some milliseconds.
        pair_connect_max_ms: time until a connection to another node is authenticated.
        pair_rtt_warn_ms, pair_rtt_max_ms: median round trip to another node.
        pair_throughput_warn_mb_s, pair_throughput_min_mb_s: rate of a stream to another node, and
            back, in 10^6 bytes a second.
    """

    gpus_expected: int = 0
    gpu_temperature_max_c: float = 90.0
    gpu_temperature_margin_c: float = 5.0
    ecc_uncorrected_volatile_max: float = 0.0
    ecc_uncorrected_aggregate_warn: float = 0.0
    retired_pages_max: float = 59.0
    clock_offset_warn_ms: float = 100.0
    clock_offset_max_ms: float = 300_000.0
    clock_step_warn_ms: float = 20.0
    disk_free_bytes_min: float = 256 * _MB
    disk_free_share_warn: float = 0.05
    disk_free_inodes_min: float = 1000.0
    disk_write_warn_ms: float = 500.0
    disk_write_max_ms: float = 10_000.0
    memory_available_bytes_min: float = 256 * _MB
    edac_corrected_warn: float = 0.0
    edac_uncorrected_max: float = 0.0
    compute_warn_ms: float = 500.0
    pair_connect_max_ms: float = 2000.0
    pair_rtt_warn_ms: float = 10.0
    pair_rtt_max_ms: float = 500.0
    pair_throughput_warn_mb_s: float = 100.0
    pair_throughput_min_mb_s: float = 10.0


def parse_limits(given: Iterable[str]) -> HealthLimits:
    """Return limits from ``NAME=VALUE`` texts; the others have their defaults.

    Raises:
        BadInput: for a name that is no limit, or a value that is no number of 0 or more.
    """
    changed: dict[str, Any] = {}
    for assignment in given:
        name, _, text = assignment.partition("=")
        if name not in HealthLimits.__struct_fields__:
            names = HealthLimits.__struct_fields__
            closest = closest_name(name, names)
            remedy = (
                f"write {closest}=VALUE"
                if closest
                else f"write NAME=VALUE with one of {', '.join(names)}"
            )
            raise BadInput("limit", assignment, remedy)
        kind = int if name == "gpus_expected" else float
        try:
            changed[name] = kind(text)
        except ValueError:
            raise BadInput("limit", assignment, f"write {name}=VALUE with a number") from None
        if not 0 <= changed[name] < math.inf:
            raise BadInput("limit", assignment, "use 0 or more, and a finite number")
    return HealthLimits(**changed)
