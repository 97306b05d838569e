"""All probes of one node, together.

-> ``health/verdict.py``: decides by the findings. ``cli/machine/node.py``: checks by hand.
-> ``daemon/node_check.py``: checks in a run, and watches the GPUs.
"""

from __future__ import annotations

from pathlib import Path

from chaoskit.health import clock, compute, disk, memory, nvml, pair
from chaoskit.health import gpu as gpus
from chaoskit.health.finding import of_node
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import Finding

PROBES = ("gpu", "clock", "disk", "memory", "compute")
_QUICK_BYTES = 2**18


def examine(
    node: str,
    directory: Path,
    limits: HealthLimits,
    *,
    only: tuple[str, ...] = PROBES,
    against: tuple[tuple[str, int], ...] = (),
    token: str = "",
) -> list[Finding]:
    """Run the probes of this node, in about half a second; GPUs and other nodes take longer.

    Return the findings of all probes. A disk, a driver or another node that fails gives a bad
    finding instead of an error.

    Args:
        node: name of the node for the findings.
        directory: directory to which the node writes.
        limits: limits of good values.
        only: the probes of :data:`PROBES` to run.
        against: host and port of pair servers of other nodes.
        token: secret that these servers know.
    """
    findings: list[Finding] = []
    if "gpu" in only:
        findings += gpus.judge(nvml.read(), limits)
    if "clock" in only:
        findings += clock.judge(clock.read(), limits)
    if "disk" in only:
        findings += disk.judge(disk.read(directory), limits)
    if "memory" in only:
        findings += memory.judge(memory.read(), limits)
    if "compute" in only:
        findings += compute.judge(compute.read(), limits)
    for address in against:
        findings += pair.judge(pair.read(address, token), limits)
    return of_node(node, findings)


def examine_quickly(node: str, directory: Path, limits: HealthLimits) -> list[Finding]:
    """Run the probes of disk, memory and clock, and return their findings.

    They need a tenth of a second and no torch. GPUs are not examined: ``daemon/node_check.py``
    watches them by an own :class:`chaoskit.health.nvml.Nvml`.
    """
    findings = disk.judge(disk.read(directory, _QUICK_BYTES), limits)
    findings += memory.judge(memory.read(), limits)
    findings += clock.judge(clock.read(), limits)
    return of_node(node, findings)
