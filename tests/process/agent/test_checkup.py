"""Tests of an agent's checkup: it reports at once, and again when a GPU has an event."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import stub_nvml
from recorded_nvml import RecordedNvml

from chaoskit.daemon.node_check import start_checkup, warn_if_hot
from chaoskit.health import HealthLimits, NodeStanding, decide, gpu, nvml
from chaoskit.wire.messages import HealthReport

WAIT_S = 30.0


def test_without_gpus_it_looks_once(tmp_path: Path) -> None:
    reports: list[HealthReport] = []
    has_reported = threading.Event()
    before = set(threading.enumerate())
    start_checkup(
        "n1", tmp_path, "cpu", lambda report: (reports.append(report), has_reported.set())[0]
    )
    assert has_reported.wait(WAIT_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
    (report,) = reports
    assert (report.node, {finding.node for finding in report.findings}) == ("n1", {"n1"})
    assert {finding.what.partition(".")[0] for finding in report.findings} == {
        "disk",
        "memory",
        "clock",
    }
    assert list(tmp_path.iterdir()) == []


_WATCHES = """
import sys
from pathlib import Path
import msgspec
from chaoskit.daemon.node_check import start_checkup
def tell(report):
    print(msgspec.json.encode(report).decode(), flush=True)
start_checkup("n1", Path(sys.argv[1]), "cuda", tell)
for line in sys.stdin:
    pass
"""


def test_a_job_on_gpus_finds_none_here(tmp_path: Path) -> None:
    """A node without a driver or a binding is not fit for such a job."""
    hidden = "import sys; sys.modules['pynvml'] = None" + _WATCHES
    with subprocess.Popen(
        [sys.executable, "-c", hidden, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        report = json.loads(process.stdout.readline())
        process.stdin.close()
    assert [finding["what"] for finding in report["findings"] if finding["severity"] == "bad"] == [
        "gpu.count"
    ]


def test_an_xid_is_told_when_it_comes_and_is_not_forgotten(tmp_path: Path) -> None:
    """The real binding is used with a library that reports XIDs from a file."""
    (disk := tmp_path / "disk").mkdir()
    xids = tmp_path / "xids"
    xids.touch()
    environment = stub_nvml.environment(tmp_path, xids)
    with subprocess.Popen(
        [sys.executable, "-c", _WATCHES, str(disk)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        lines = process.stdout

        def next_report() -> HealthReport:
            assert select.select([lines], [], [], WAIT_S)[0], "it says nothing"
            return msgspec.json.decode(lines.readline(), type=HealthReport)

        first = next_report()
        assert not decide("n1", first.findings).refused
        with xids.open("a") as file:
            file.write("0 31\n")
        second = next_report()
        assert not decide("n1", second.findings).refused, "the application's own"
        assert ("gpu0.xid", 31.0) in {(finding.what, finding.value) for finding in second.findings}
        with xids.open("a") as file:
            file.write("0 31\n1 79\n")
        third = next_report()
        process.stdin.close()
    verdict = decide("n1", third.findings)
    assert verdict.refused
    assert {("gpu0.xid", 31.0), ("gpu1.xid", 79.0), ("gpu1.lost", "lost")} <= {
        (finding.what, finding.value) for finding in third.findings
    }


def test_a_gpu_that_gets_hot_from_its_work_is_not_taken_away() -> None:
    """A hot GPU is a reason to refuse the node only before training begins."""
    findings = gpu.judge(nvml.read(RecordedNvml("h100_throttled")), HealthLimits())
    assert decide("n1", findings).refused
    softened = decide("n1", map(warn_if_hot, findings))
    assert (softened.standing, len(softened.reasons)) == (NodeStanding.WARNED, 5)
    assert decide(
        "n1", map(warn_if_hot, gpu.judge(nvml.read(RecordedNvml("gsp_timeout")), HealthLimits()))
    ).refused
