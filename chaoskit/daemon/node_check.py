"""A node's look at itself, in a thread of its keeper: a disk that hangs holds up nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from chaoskit.health import Limits, gpu, nvml
from chaoskit.health.examine import examine_quickly
from chaoskit.health.finding import of_node
from chaoskit.process.linux import lower_priority, set_name
from chaoskit.wire.messages import Finding, HealthReport

_NICENESS = 10
_AGAIN_S = 30.0


def start_checkup(
    node: str, directory: Path, device: Literal["cpu", "cuda"], tell: Callable[[HealthReport], None]
) -> None:
    """Look once; where the job uses GPUs, watch them as long as the process lives.

    Args:
        directory: where the job writes on this node.
        tell: called with each report, on the thread that looks.
    """
    checkup = _Checkup(node, directory, device == "cuda", tell)
    threading.Thread(target=checkup.run, name="checkup", daemon=True).start()


class _Checkup:
    def __init__(
        self, node: str, directory: Path, has_gpus: bool, tell: Callable[[HealthReport], None]
    ) -> None:
        self._node, self._directory, self._tell = node, directory, tell
        self._limits = Limits(gpus_expected=1 if has_gpus else 0)
        self._has_gpus = has_gpus
        self._found: list[Finding] = []  # on everything but GPUs

    def run(self) -> None:
        set_name("checkup")
        lower_priority(_NICENESS)
        began_s = time.monotonic()
        self._found = examine_quickly(self._node, self._directory, self._limits)
        if self._has_gpus:
            self._watch(began_s)
        else:
            self._report([], began_s)

    def _report(self, of_gpus: list[Finding], began_s: float) -> None:
        found = (*self._found, *of_node(self._node, of_gpus))
        self._tell(HealthReport(self._node, found, (time.monotonic() - began_s) * 1e3))

    def _watch(self, began_s: float) -> None:
        """Report what the GPUs say at once, and again when an XID comes or something else is wrong with them."""
        try:
            reader = nvml.Nvml()
        except nvml.NoGpu as error:
            reading = gpu.GpuReading(absent=str(error), broken=error.broken)
            self._report(gpu.judge(reading, self._limits), began_s)
            return
        first = reading = reader.read()
        told = gpu.judge(reading, self._limits)
        self._report(told, began_s)
        while True:
            struck = reader.await_xid(_AGAIN_S)
            began_s = time.monotonic()
            reading = reader.read()
            found = [while_it_trains(one) for one in gpu.judge(reading, self._limits, first)]
            if struck or _troubles(found) != _troubles(told):
                told = found
                self._report(found, began_s)


def while_it_trains(finding: Finding) -> Finding:
    """A GPU that is hot from its work is slow, and may cool down: whether it costs too much is told by step times."""
    if finding.severity == "bad" and finding.what.endswith((".clocks", ".temperature_c")):
        return msgspec.structs.replace(finding, severity="warn")
    return finding


def _troubles(found: list[Finding]) -> set[tuple[str, str]]:
    """What is wrong, without the numbers: a temperature that moves is no news."""
    return {(one.what, one.severity) for one in found if one.severity != "ok"}
