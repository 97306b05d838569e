"""All probes of one node, together."""

from __future__ import annotations

from pathlib import Path

from chaoskit.health import clock, compute, disk, memory, nvml, pair
from chaoskit.health import gpu as gpus
from chaoskit.health.finding import of_node
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import Finding

PROBES = ("gpu", "clock", "disk", "memory", "compute")
_QUICK_BYTES = 2**18


def examine(
    node: str,
    directory: Path,
    limits: Limits,
    *,
    only: tuple[str, ...] = PROBES,
    against: tuple[tuple[str, int], ...] = (),
    token: str = "",
) -> list[Finding]:
    """Look at everything here, in about half a second; with GPUs and other nodes it takes longer.

    Args:
        directory: where the node writes.
        only: which of :data:`PROBES`.
        against: pair servers of other nodes, which know ``token``.
    """
    found: list[Finding] = []
    if "gpu" in only:
        found += gpus.judge(nvml.read(), limits)
    if "clock" in only:
        found += clock.judge(clock.read(), limits)
    if "disk" in only:
        found += disk.judge(disk.read(directory), limits)
    if "memory" in only:
        found += memory.judge(memory.read(), limits)
    if "compute" in only:
        found += compute.judge(compute.read(), limits)
    for address in against:
        found += pair.judge(pair.read(address, token), limits)
    return of_node(node, found)


def examine_quickly(node: str, directory: Path, limits: Limits) -> list[Finding]:
    """What can be seen in a tenth of a second, and without torch: for an agent that has other things to do.

    GPUs are not among it: an agent that watches them has its own :class:`chaoskit.health.nvml.Nvml`.
    """
    found = disk.judge(disk.read(directory, _QUICK_BYTES), limits)
    found += memory.judge(memory.read(), limits)
    found += clock.judge(clock.read(), limits)
    return of_node(node, found)
