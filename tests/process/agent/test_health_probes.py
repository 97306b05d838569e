"""Tests of the probes of clock, disk, memory and processor, on this machine and on disks that are
broken on purpose.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from chaoskit.errors import BadInput
from chaoskit.health import Finding, HealthLimits, clock, compute, disk, memory
from chaoskit.health.clock import ClockReading
from chaoskit.health.disk import DiskReading
from chaoskit.health.examine import PROBES, examine
from chaoskit.health.finding import at_least, at_most
from chaoskit.health.limits import parse_limits
from chaoskit.health.memory import MemoryReading
from chaoskit.substrate.core.disk import Failing, Full, ReadOnly, Slow, Trouble
from chaoskit.substrate.disk.disks import Disk
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.undo import UndoLog

LIMITS = HealthLimits()
#: However long a probe takes on a busy machine, it is no finding.
PATIENT = HealthLimits(
    disk_write_warn_ms=600_000.0, disk_write_max_ms=600_000.0, compute_warn_ms=600_000.0
)
numbers = st.floats(allow_nan=False)


def severities(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.severity for finding in findings}


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.severity for finding in findings if finding.severity != "ok"}


# -- a value beside its limits ---------------------------------------------------------------------


@given(numbers, numbers, numbers)
def test_a_limit_is_the_last_good_value(value: float, one: float, other: float) -> None:
    least, most = sorted((one, other))
    above = at_most("x", value, warn=least, bad=most, remedy="r")
    assert above.severity == ("ok" if value <= least else "warn" if value <= most else "bad")
    below = at_least("x", value, warn=most, bad=least, remedy="r")
    assert below.severity == ("ok" if value >= most else "warn" if value >= least else "bad")
    for finding in (above, below):
        assert bool(finding.remedy) == (finding.severity != "ok")


def test_what_is_no_number_is_bad() -> None:
    assert (
        at_most("x", float("nan"), bad=1.0).severity
        == at_least("x", float("nan"), bad=1.0).severity
        == "bad"
    )


def test_limits_are_set_by_name() -> None:
    assert parse_limits([]) == HealthLimits()
    assert parse_limits(["gpus_expected=8", "disk_free_bytes_min=1e9"]) == HealthLimits(
        gpus_expected=8, disk_free_bytes_min=1e9
    )


@pytest.mark.parametrize(
    "given", ["gpus=8", "gpus_expected", "gpus_expected=1.5", "clock_offset_max_ms=-1", "=", ""]
)
def test_what_is_no_limit_is_refused(given: str) -> None:
    with pytest.raises(BadInput):
        parse_limits([given])


# -- clock -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "expected"), [(0.01, {}), (3600_000.0, {"clock.step_ms": "warn"})]
)
def test_a_clock_that_is_set_is_worth_a_warning(step_ms: float, expected: dict[str, str]) -> None:
    assert wrong(clock.judge(ClockReading(step_ms=step_ms), LIMITS)) == expected


def test_a_clock_that_is_left_alone_does_not_step() -> None:
    """The difference of both clocks is within the error of the readings, and of the rate at which a
    clock is slewed.

    One look out of many is enough: the machine may be busy, or its clock set, during the others.
    """

    def looks_still() -> bool:
        began_ns = time.monotonic_ns()
        step_ms = clock.read(0.01).step_ms
        took_ms = (time.monotonic_ns() - began_ns) / 1e6
        return step_ms <= 1e-3 * took_ms

    assert wait_until(looks_still, "a look during which the clock did not step")


# -- disk ------------------------------------------------------------------------------------------


def test_a_good_disk_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    """A good disk returns the data of the probe, and no file of it is left."""
    reading = disk.read(tmp_path)
    assert (reading.error, reading.intact, reading.read_only) == ("", True, False)
    assert 0 < reading.free_bytes <= reading.size_bytes == shutil.disk_usage(tmp_path).total
    assert reading.write_ms > 0
    assert list(tmp_path.iterdir()) == []
    roomy = msgspec.structs.replace(PATIENT, disk_free_bytes_min=1.0)
    assert "bad" not in severities(disk.judge(reading, roomy)).values()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    (finding,) = disk.judge(disk.read(tmp_path / "none"), LIMITS)
    assert (finding.what, finding.severity) == ("disk.writable", "bad")
    assert "No such file" in finding.detail


@pytest.mark.skipif(bool(capabilities.disks()), reason=capabilities.disks() or "possible here")
@pytest.mark.parametrize(
    ("trouble", "what", "says"),
    [
        (Full(), "disk.writable", "No space left"),
        (Full(room_bytes=2**19), "disk.writable", "No space left"),
        (ReadOnly(), "disk.writable", "Read-only"),
        (Failing(("sync",)), "disk.writable", "Input/output error"),
        (Failing(("read",)), "disk.writable", "Input/output error"),
        (Slow(delay_ms=30.0), "disk.write_ms", ""),
    ],
    ids=["full", "nearly full", "read-only", "fails to sync", "fails to read", "slow"],
)
def test_a_disk_that_is_broken(
    trouble: Trouble, what: str, says: str, undo: UndoLog, tmp_path: Path
) -> None:
    """A faulty file system is mounted over the directory, in a process with its own mounts."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as node:
        try:
            assert node.stdout is not None
            node.stdout.readline()
            broken = Disk(directory, ["nsenter", f"--mount=/proc/{node.pid}/ns/mnt"], undo)
            inside = Path(f"/proc/{node.pid}/root{directory}")
            assert disk.read(inside).error == "", "nothing is wrong with it yet"
            broken.impose(trouble)
            limits = HealthLimits(
                disk_write_warn_ms=5.0, disk_write_max_ms=20.0, disk_free_bytes_min=0.0
            )
            bad_findings = [
                finding
                for finding in disk.judge(disk.read(inside), limits)
                if finding.severity == "bad"
            ]
            broken.close()
        finally:
            node.kill()
    assert what in {finding.what for finding in bad_findings}
    assert says in bad_findings[0].detail


_MOUNTED = """
import os, subprocess, sys
from pathlib import Path
from chaoskit.health import HealthLimits, disk
directory, options, fill = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", directory], check=True)
for number in range(int(fill)):
    Path(directory, str(number)).touch()
if "ro" in options.split(","):
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
import msgspec
reading = disk.read(Path(directory))
limits = HealthLimits(disk_write_warn_ms=600_000.0, disk_write_max_ms=600_000.0)
print(msgspec.json.encode([reading.free_bytes, disk.judge(reading, limits)]).decode())
"""


@pytest.mark.parametrize(
    ("options", "files", "what"),
    [
        ("size=1m", 0, {"disk.free_bytes": "bad"}),
        ("size=300m,nr_inodes=1005", 10, {"disk.free_inodes": "bad"}),
        ("size=300m,ro", 0, {"disk.writable": "bad"}),
        ("size=300m", 0, {}),
    ],
    ids=["small", "without inodes", "read-only", "good"],
)
def test_a_file_system_of_the_kernel(
    options: str, files: int, what: dict[str, str], tmp_path: Path
) -> None:
    """A tmpfs in a mount namespace of its own is full or read-only by the kernel's own report; its
    room is read.
    """
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, or root")
    command = ["unshare", "-rm", sys.executable, "-c", _MOUNTED, str(tmp_path), options, str(files)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    free_bytes, findings = msgspec.json.decode(process.stdout, type=tuple[int, list[Finding]])
    assert wrong(findings) == what
    assert free_bytes == int(options.partition("m")[0].removeprefix("size=")) * 2**20


def test_what_comes_back_changed_is_bad() -> None:
    reading = DiskReading(
        path="/d", free_bytes=10**12, size_bytes=10**12, write_ms=1.0, read_ms=1.0, intact=False
    )
    assert wrong(disk.judge(reading, LIMITS)) == {"disk.intact": "bad"}


def test_a_file_system_that_counts_no_inodes_is_not_short_of_them() -> None:
    reading = DiskReading(path="/d", free_bytes=10**12, size_bytes=10**12)
    assert wrong(disk.judge(reading, LIMITS)) == {}


# -- memory ----------------------------------------------------------------------------------------


def test_available_memory_is_part_of_what_is_there() -> None:
    assert 0 < memory.read().available_bytes <= psutil.virtual_memory().total


def test_controllers_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for number, counts in enumerate([(3, 0), (4, 1)]):
        (tmp_path / f"mc{number}").mkdir()
        for name, count in zip(("ce_count", "ue_count"), counts, strict=True):
            (tmp_path / f"mc{number}" / name).write_text(f"{count}\n")
    reading = memory.read(tmp_path)
    assert (reading.edac_corrected, reading.edac_uncorrected) == (7, 1)
    assert memory.read(tmp_path / "none").edac_corrected is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"available_bytes": 1}, {"memory.available_bytes": "bad"}),
        ({"edac_corrected": 5, "edac_uncorrected": 0}, {"memory.edac_corrected": "warn"}),
        (
            {"edac_corrected": 5, "edac_uncorrected": 1},
            {"memory.edac_corrected": "warn", "memory.edac_uncorrected": "bad"},
        ),
    ],
)
def test_memory_is_judged(changed: dict[str, int], expected: dict[str, str]) -> None:
    good = MemoryReading(available_bytes=2**34)
    assert wrong(memory.judge(msgspec.structs.replace(good, **changed), LIMITS)) == expected


# -- processor -------------------------------------------------------------------------------------


def test_the_known_answer_is_what_integers_come_to_without_torch() -> None:
    """The answer is computed with Python's own integers, which do not overflow, reduced to 64 bits
    by hand.
    """
    size, modulus = 96, 2**64
    factor, addend = 2862933555777941757, 3037000493
    rows = [
        [_signed(((row * size + column) * factor + addend) % modulus) for column in range(size)]
        for row in range(size)
    ]
    for _ in range(2):
        rows = [
            [
                _signed((sum(map(int.__mul__, row, other_row)) + (row[column] >> 7)) % modulus)
                for column, other_row in enumerate(rows)
            ]
            for row in rows
        ]
    import xxhash

    data = b"".join((number % modulus).to_bytes(8, "little") for row in rows for number in row)
    assert xxhash.xxh3_64_hexdigest(data) == compute.KNOWN_INTEGERS


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def test_this_processor_computes_right_and_always_the_same() -> None:
    reading = compute.read()
    assert wrong(compute.judge(reading, PATIENT)) == {}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = compute.floats_digest()
    finally:
        torch.set_num_threads(threads)
    other = "from chaoskit.health import compute; import torch; torch.set_num_threads(1); print(compute.floats_digest())"
    process = subprocess.run(
        [sys.executable, "-c", other], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == alone, "another process on the same machine"


def test_the_computation_leaves_the_jobs_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    compute.read()
    assert torch.equal(torch.rand(3), expected)


def test_a_processor_that_computes_wrongly() -> None:
    """A result that differs from the known one, from another round, or from another node is bad."""
    good = compute.read(2)
    flipped = msgspec.structs.replace(good, integers=("0" * 16, compute.KNOWN_INTEGERS))
    assert wrong(compute.judge(flipped, PATIENT)) == {"compute.integers": "bad"}
    unsteady = msgspec.structs.replace(good, floats=("a", "b"))
    assert wrong(compute.judge(unsteady, PATIENT)) == {"compute.floats": "bad"}
    assert wrong(compute.judge(good, PATIENT, expected_floats="another")) == {
        "compute.floats": "bad"
    }
    assert wrong(compute.judge(good, PATIENT, expected_floats=good.floats[0])) == {}


# -- together --------------------------------------------------------------------------------------


def test_a_node_is_examined_whole(tmp_path: Path) -> None:
    findings = examine("node7", tmp_path, LIMITS)
    assert {finding.node for finding in findings} == {"node7"}
    assert {
        finding.what.rstrip("0123456789").partition(".")[0].rstrip("0123456789")
        for finding in findings
    } == set(PROBES)
    only = examine("node7", tmp_path, LIMITS, only=("disk",))
    assert {finding.what.partition(".")[0] for finding in only} == {"disk"}


def test_an_agents_look_needs_no_torch_and_leaves_nothing(tmp_path: Path) -> None:
    """An agent examines its node without the time and memory that torch takes, and leaves no
    file.
    """
    code = (
        "import sys; from pathlib import Path; from chaoskit.health import HealthLimits\n"
        "from chaoskit.health.examine import examine_quickly\n"
        f"found = examine_quickly('n', Path({str(tmp_path)!r}), HealthLimits())\n"
        "print('torch' in sys.modules, len(found) > 0)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["False", "True"]
    assert os.listdir(tmp_path) == []
