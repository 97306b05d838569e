"""Health check of a node, in a thread of its keeper, where a disk that hangs delays nothing.

-> ``health/examine.py`` and ``health/gpu.py``: the probes and their limits.
-> ``coordinator/detectors/fitness.py``: whether the node is unfit.
-> ``coordinator/handlers/on_measurement.py``: acts on the reports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from chaoskit.health import HealthLimits, gpu, nvml
from chaoskit.health.examine import examine_quickly
from chaoskit.health.finding import of_node
from chaoskit.process.linux import lower_priority, set_name
from chaoskit.wire.messages import Finding, HealthReport

_NICENESS = 10
_RECHECK_S = 30.0


def start_checkup(
    node: str, directory: Path, device: Literal["cpu", "cuda"], send: Callable[[HealthReport], None]
) -> None:
    """Start a thread that checks the node once and sends a report.

    If the job uses GPUs that can be read, the thread watches them for the life of the process. It
    sends a further report after an XID, or when the findings on GPUs that are not ok change.

    Args:
        node: name of the node.
        directory: directory of this node to which the job writes.
        device: device of the job.
        send: called with each report, on the thread of the check.
    """
    checkup = _Checkup(node, directory, device == "cuda", send)
    threading.Thread(target=checkup.run, name="checkup", daemon=True).start()


class _Checkup:
    """The health check of a node, as a thread runs it."""

    def __init__(
        self, node: str, directory: Path, has_gpus: bool, send: Callable[[HealthReport], None]
    ) -> None:
        self._node, self._directory, self._send = node, directory, send
        self._limits = HealthLimits(gpus_expected=1 if has_gpus else 0)
        self._has_gpus = has_gpus
        self._findings: list[Finding] = []  # all but those on GPUs

    def run(self) -> None:
        """Check the node and report the findings, then watch the GPUs if there are any."""
        set_name("checkup")
        lower_priority(_NICENESS)
        began_s = time.monotonic()
        self._findings = examine_quickly(self._node, self._directory, self._limits)
        if self._has_gpus:
            self._watch(began_s)
        else:
            self._report([], began_s)

    def _report(self, gpu_findings: list[Finding], began_s: float) -> None:
        """Send a report with all findings and the time since ``began_s``."""
        findings = (*self._findings, *of_node(self._node, gpu_findings))
        self._send(HealthReport(self._node, findings, (time.monotonic() - began_s) * 1e3))

    def _watch(self, began_s: float) -> None:
        """Report the GPUs at once, and again after an XID or when their troubles change.

        Returns only if the GPUs cannot be read.
        """
        try:
            reader = nvml.Nvml()
        except nvml.NoGpu as error:
            reading = gpu.GpuReading(absent=str(error), broken=error.broken)
            self._report(gpu.judge(reading, self._limits), began_s)
            return
        first = reading = reader.read()
        reported = gpu.judge(reading, self._limits)
        self._report(reported, began_s)
        while True:
            has_xid = reader.await_xid(_RECHECK_S)
            began_s = time.monotonic()
            reading = reader.read()
            findings = [warn_if_hot(finding) for finding in gpu.judge(reading, self._limits, first)]
            if has_xid or _troubles(findings) != _troubles(reported):
                reported = findings
                self._report(findings, began_s)


def warn_if_hot(finding: Finding) -> Finding:
    """Return a finding, as a mere warning if a GPU is hot or slow from its work.

    The GPU may cool down, and step times show whether it costs too much.
    """
    if finding.severity == "bad" and finding.what.endswith((".clocks", ".temperature_c")):
        return msgspec.structs.replace(finding, severity="warn")
    return finding


def _troubles(findings: list[Finding]) -> set[tuple[str, str]]:
    """Return subject and severity of each finding that is not ok.

    Numbers are left out, because a change of a temperature alone is not reported.
    """
    return {(finding.what, finding.severity) for finding in findings if finding.severity != "ok"}
