"""Disks that are full, slow, read-only or failing: the pure rules, a real file system, and jobs
that use it.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from chaoskit.errors import BadInput, HarnessError
from chaoskit.process.linux import is_ending, start_ticks
from chaoskit.pytest_plugin import Chaos
from chaoskit.substrate.core.actions import BreakDisk
from chaoskit.substrate.core.disk import (
    OPERATIONS,
    DiskTroubles,
    Failing,
    Full,
    ReadOnly,
    Slow,
    Trouble,
)
from chaoskit.substrate.core.processes import HOST
from chaoskit.substrate.disk.disks import Disk, Disks
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.undo import UndoLog
from chaoskit.vocabulary import Verdict
from faults import DiskError, DiskFull, Fault, ReadOnlyDisk, SlowDisk

JOBS = Path(__file__).parents[2] / "jobs" / "failing" / "saves.py"
BEARS, ENDS = f"{JOBS}:bears_errors", f"{JOBS}:ends_with_errors"

needs_fuse = pytest.mark.skipif(
    bool(capabilities.disks()), reason=capabilities.disks() or "possible here"
)


# -- the rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "refused", "number"),
    [
        (Full(), {"write"}, errno.ENOSPC),
        (ReadOnly(), {"write", "change"}, errno.EROFS),
        (Failing(), set(OPERATIONS), errno.EIO),
        (Failing(("sync",)), {"sync"}, errno.EIO),
        (Slow(5.0), set(), 0),
    ],
)
def test_what_a_trouble_refuses(trouble: Trouble, refused: set[str], number: int) -> None:
    """Each trouble refuses its operations with its error, counts them, and ends when it is lifted."""
    ailments = DiskTroubles()
    imposed = ailments.impose(trouble)
    rulings = {operation: ailments.rule(operation, 1) for operation in OPERATIONS}
    assert {operation for operation, ruling in rulings.items() if ruling.errno} == refused
    assert {ruling.errno for ruling in rulings.values()} <= {0, number}
    slow = isinstance(trouble, Slow)
    assert {ruling.delay_ms for ruling in rulings.values()} == {5.0 if slow else 0.0}
    assert ailments.affected_count(imposed) == (len(OPERATIONS) if slow else len(refused))
    assert ailments.lift(imposed) == ailments.affected_count(imposed)
    assert ailments.rule("write", 1) == (0, 0.0), "it is over"


@given(st.integers(0, 1000), st.lists(st.integers(0, 300), max_size=20))
def test_a_disk_takes_what_it_has_room_for(room_bytes: int, sizes: list[int]) -> None:
    """A full disk takes each write that still fits."""
    ailments, written = DiskTroubles(), 0
    ailments.impose(Full(room_bytes))
    for size in sizes:
        fits = written + size <= room_bytes
        assert (ailments.rule("write", size).errno == 0) == fits
        written += size if fits else 0


def test_troubles_add_up() -> None:
    """Delays of several troubles add up, and an error wins."""
    ailments = DiskTroubles()
    for trouble in (Slow(5.0), Slow(10.0, bytes_per_s=1000.0), ReadOnly(), Full()):
        ailments.impose(trouble)
    ruling = ailments.rule("write", 100)
    assert ruling == (errno.EROFS, pytest.approx(115.0))


def test_a_share_of_operations_fails() -> None:
    """A trouble with a share fails about that share of the operations."""
    ailments = DiskTroubles(seed=3)
    imposed = ailments.impose(Failing(share=0.25))
    failed = sum(bool(ailments.rule("read", 1).errno) for _ in range(2000))
    assert failed == ailments.affected_count(imposed)
    assert 400 < failed < 600


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (DiskFull(rank=1, at_step=2, room_bytes=-1), "room_bytes"),
        (DiskFull(rank=1, at_step=2, directory="/nowhere/at/all"), "directory"),
        (DiskFull(rank=1, at_step=2, directory="."), "directory"),
        (DiskFull(rank=1, at_step=2, heal_after_s=0.0), "heal_after_s"),
        (SlowDisk(rank=1, at_step=2, delay_ms=0.0), "delay_ms"),
        (SlowDisk(rank=1, at_step=2, bytes_per_s=-1.0), "bytes_per_s"),
        (DiskError(rank=1, at_step=2, share=0.0), "share"),
        (DiskError(rank=1, at_step=2, operations=()), "operations"),
    ],
)
def test_bad_input(fault: Fault, field: str) -> None:
    """A fault of a disk that cannot work is refused, with the field that is wrong."""
    with pytest.raises(BadInput) as refused:
        fault.validate(nodes=2, steps=9)
    assert refused.value.field == field


# -- a real file system ----------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with mounts of its own, in place of a node."""
    command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; exec sleep 600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def enter(pid: int) -> list[str]:
    return ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]


def seen_by(process: subprocess.Popen[bytes], path: Path) -> Path:
    return Path(f"/proc/{process.pid}/root{path}")


@needs_fuse
def test_a_directory_is_what_it_was_until_something_is_wrong(
    node: subprocess.Popen[bytes], undo: UndoLog, tmp_path: Path
) -> None:
    """A disk without a trouble behaves as the directory below it, and only its node sees it."""
    directory = tmp_path / "disk"
    directory.mkdir()
    (directory / "old").write_text("from before")
    disk = Disk(directory, enter(node.pid), undo)
    inside = seen_by(node, directory)
    assert os.path.ismount(inside)
    assert not os.path.ismount(directory), "others do not see it"
    assert (inside / "old").read_text() == "from before"
    data = os.urandom(300_000)
    (inside / "a").write_bytes(data)
    with (inside / "a").open("ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())
    (inside / "a").rename(inside / "b")
    (inside / "deep").mkdir()
    (inside / "deep" / "link").symlink_to("../b")
    os.truncate(inside / "old", 4)
    (inside / "b").chmod(0o600)
    assert (directory / "deep" / "link").read_bytes() == data + b"more"
    assert (directory / "old").read_text() == "from"
    assert sorted(path.name for path in inside.iterdir()) == ["b", "deep", "old"]
    assert (directory / "b").stat().st_mode & 0o777 == 0o600
    disk.close()


@needs_fuse
@pytest.mark.parametrize(
    ("trouble", "number"),
    [(Full(1000), errno.ENOSPC), (ReadOnly(), errno.EROFS), (Failing(), errno.EIO)],
)
def test_errors_reach_the_process_that_writes(
    node: subprocess.Popen[bytes], undo: UndoLog, tmp_path: Path, trouble: Trouble, number: int
) -> None:
    """A node gets the error of its trouble, is counted, and writes again after the lift; other
    processes write all the time.
    """
    directory = tmp_path / "disk"
    directory.mkdir()
    disks = Disks(undo, enter, lambda name: HOST.find(node.pid))
    broken = disks.apply("node0", BreakDisk(directory, trouble))
    with pytest.raises(OSError, match=os.strerror(number)):
        (seen_by(node, directory) / "a").write_bytes(bytes(10_000))
    assert broken.shown() >= 1
    (directory / "b").write_bytes(b"others do not feel it")
    assert broken.lift()
    assert broken.shown() >= 1, "what was counted stays known"
    (seen_by(node, directory) / "a").write_bytes(bytes(10_000))
    disks.close()


@needs_fuse
def test_a_full_disk_says_so_before_it_refuses(
    node: subprocess.Popen[bytes], undo: UndoLog, tmp_path: Path
) -> None:
    """A node that asks for the free space sees none left; other nodes see their own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    disks = Disks(undo, enter, lambda name: HOST.find(node.pid))
    full = disks.apply(
        "node0", BreakDisk(directory, Full(room_bytes=10 * os.statvfs(directory).f_frsize))
    )
    inside = seen_by(node, directory)
    assert os.statvfs(inside).f_bavail == os.statvfs(inside).f_bfree == 10
    (inside / "a").write_bytes(bytes(os.statvfs(directory).f_frsize * 4))
    assert os.statvfs(inside).f_bavail == 6
    assert os.statvfs(directory).f_bavail > 1000
    full.lift()
    assert os.statvfs(inside).f_bavail > 1000
    disks.close()


@needs_fuse
def test_a_file_that_is_opened_for_direct_access_is_written(
    node: subprocess.Popen[bytes], undo: UndoLog, tmp_path: Path
) -> None:
    """Direct access works as on a directory without a disk in front of it."""
    directory = tmp_path / "disk"
    directory.mkdir()
    disk = Disk(directory, enter(node.pid), undo)
    page = mmap.mmap(-1, 4096)
    page.write(b"x" * 4096)
    file = os.open(seen_by(node, directory) / "a", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    assert os.write(file, page) == 4096
    os.close(file)
    assert (directory / "a").read_bytes() == b"x" * 4096
    disk.close()


@needs_fuse
def test_what_is_slow_takes_longer(
    node: subprocess.Popen[bytes], undo: UndoLog, tmp_path: Path
) -> None:
    """Each operation of a slow disk takes the delay longer."""
    directory = tmp_path / "disk"
    directory.mkdir()
    disks = Disks(undo, enter, lambda name: HOST.find(node.pid))
    slow = disks.apply("node0", BreakDisk(directory, Slow(100.0)))
    begin_s = time.monotonic()
    (seen_by(node, directory) / "a").write_bytes(b"x")
    assert time.monotonic() - begin_s > 0.2, "it was made, and written"
    assert slow.shown() >= 2
    disks.close()


@needs_fuse
def test_no_other_process_has_its_directory_troubled(undo: UndoLog, tmp_path: Path) -> None:
    """A process that shares the mounts of this machine is refused a trouble."""
    disks = Disks(undo, enter, lambda name: HOST.find(os.getpid()))
    with pytest.raises(HarnessError, match="no mounts of its own"):
        disks.apply("node0", BreakDisk(tmp_path, ReadOnly()))
    disks.close()


LAUNCHER = """
import sys, time
from pathlib import Path
from chaoskit.substrate.core.actions import BreakDisk
from chaoskit.substrate.core.disk import ReadOnly
from chaoskit.substrate.disk.disks import Disks
from chaoskit.substrate.core.processes import HOST
from chaoskit.substrate.undo import UndoLog

pid = int(sys.argv[1])
enter = lambda pid: ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]
disks = Disks(UndoLog(Path(sys.argv[3])), enter, lambda name: HOST.find(pid))
disks.apply("node0", BreakDisk(Path(sys.argv[2]), ReadOnly()))
(disk,) = disks.mounted.values()
print(disk.process.pid, flush=True)
time.sleep(600)
"""


@needs_fuse
def test_it_ends_with_its_launcher(node: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The process of a disk ends with a launcher that is killed."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = [sys.executable, "-c", LAUNCHER, str(node.pid), str(directory), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        ticks = start_ticks(pid)
        launcher.send_signal(signal.SIGKILL)
    wait_until(
        lambda: start_ticks(pid) != ticks or is_ending(pid), "the end of the process of the disk"
    )
    wait_until(
        lambda: not list((tmp_path / "undo").iterdir()),
        "the guard to find that nothing is left to do",
    )


# -- jobs on such disks ----------------------------------------------------------------------------

TROUBLES: list[Fault] = [
    DiskFull(rank=1, at_step=5),
    DiskFull(rank=1, at_step=5, room_bytes=70_000, heal_after_s=0.5),
    ReadOnlyDisk(rank=1, at_step=5, heal_after_s=0.5),
    SlowDisk(rank=1, at_step=5, delay_ms=30),
    DiskError(rank=1, at_step=5, share=0.5),
    DiskError(rank=1, at_step=5, operations=("sync",)),
]


@pytest.mark.slow
@pytest.mark.promise("writes that the file system has refused with ENOSPC", fault=TROUBLES[0])
@pytest.mark.promise("changes that the file system has refused with EROFS", fault=TROUBLES[2])
@pytest.mark.promise("operations that the file system has held up", fault=TROUBLES[3])
@pytest.mark.promise("operations that the file system has failed with EIO", fault=TROUBLES[4])
@needs_fuse
@pytest.mark.parametrize("fault", TROUBLES, ids=str)
def test_a_job_that_bears_errors_is_left_alone(chaos: Chaos, fault: Fault) -> None:
    """A job that handles the errors of its disk trains on, with the losses of the unbroken run."""
    outcome = chaos.run(BEARS, nodes=2, steps=100, faults=[fault])
    assert outcome.recoveries == []
    outcome.assert_same_losses_as_twin()


@needs_fuse
def test_a_job_that_does_not_is_repaired_on_another_node(chaos: Chaos) -> None:
    """A worker that ends with the error is replaced on another node, which has another disk."""
    outcome = chaos.run(
        ENDS, nodes=2, steps=40, spares=1, faults=[DiskFull(rank=1, at_step=5, heal_after_s=0.5)]
    )
    assert len(outcome.recoveries) >= 1
    assert "No space left" in outcome.recovery.cause


@pytest.mark.promise("without that there is no evidence, and the verdict is `unknown`")
@needs_fuse
def test_an_unused_disk_is_no_evidence(chaos: Chaos, tmp_path: Path) -> None:
    """A trouble that no operation has met is no evidence: the verdict is unknown."""
    fault = DiskFull(rank=1, at_step=5, directory=str(tmp_path))
    outcome = chaos.run(BEARS, nodes=2, steps=20, faults=[fault], check=False)
    assert outcome.verdict == Verdict.UNKNOWN
