"""Every limit that a probe compares with, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from chaoskit.errors import BadInput, closest_name

_MB = 10**6


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is still good, by field. ``_warn``: beyond it is worth a warning; ``_max``, ``_min``: beyond it is bad.

    docs/health.md has the source of each.

    Args:
        gpus_expected: GPUs that this node should have; 0: as many as there are.
        gpu_temperature_max_c: of GPUs that do not tell their own slowdown temperature.
        gpu_temperature_margin_c: closer than this to the slowdown temperature is worth a warning.
        ecc_uncorrected_volatile_max: uncorrected errors since the driver was loaded.
        ecc_uncorrected_aggregate_warn: the same over the life of the GPU.
        retired_pages_max: of GPUs before Ampere.
        clock_offset_warn_ms, clock_offset_max_ms: from the clock of another node.
        clock_step_warn_ms: by which the wall clock jumps while one looks.
        disk_free_bytes_min, disk_free_share_warn, disk_free_inodes_min: of the file system of the run directory.
        disk_write_warn_ms, disk_write_max_ms: a small write with fsync.
        memory_available_bytes_min: what must be free; raise it to what a worker needs.
        edac_corrected_warn, edac_uncorrected_max: errors that the memory controllers have counted since the boot.
        compute_warn_ms: the fixed computation, which takes some milliseconds.
        pair_connect_max_ms: until a connection to another node is authenticated.
        pair_rtt_warn_ms, pair_rtt_max_ms: median round trip to it.
        pair_throughput_warn_mb_s, pair_throughput_min_mb_s: one stream to it, and one back.
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


def parse_limits(given: Iterable[str]) -> Limits:
    """Limits from ``NAME=VALUE``; those that are not given have their defaults.

    Raises:
        BadInput: for a name that is no limit, or a value that is no number of 0 or more.
    """
    changed: dict[str, Any] = {}
    for one in given:
        name, _, text = one.partition("=")
        if name not in Limits.__struct_fields__:
            names = Limits.__struct_fields__
            closest = closest_name(name, names)
            remedy = (
                f"write {closest}=VALUE"
                if closest
                else f"write NAME=VALUE with one of {', '.join(names)}"
            )
            raise BadInput("limit", one, remedy)
        kind = int if name == "gpus_expected" else float
        try:
            changed[name] = kind(text)
        except ValueError:
            raise BadInput("limit", one, f"write {name}=VALUE with a number") from None
        if not 0 <= changed[name] < math.inf:
            raise BadInput("limit", one, "use 0 or more, and a finite number")
    return Limits(**changed)
