"""Tests of whole nodes that are frozen or limited, with all processes that they start; no group is
left.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

from chaoskit.errors import HarnessError
from chaoskit.process import linux
from chaoskit.substrate.core.actions import CapCpu, CapMemory, CapPids, CapWrites, Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.limits import cgroup
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.substrate.limits.device import device_of
from chaoskit.substrate.limits.holds import Holds, Saturation
from chaoskit.substrate.undo import UndoLog, sweep
from chaoskit.substrate.undo.entries import PREFIX

MIB = 2**20

# A node: forks a child at every line that it reads, prints its pid, and counts failed forks.
NODE = """
import os, sys, time
for line in sys.stdin:
    word = line.strip()
    if word == "fork":
        try:
            pid = os.fork()
        except OSError:
            print("refused", flush=True)
            continue
        if pid == 0:
            while True: time.sleep(0.005)
        print(pid, flush=True)
    elif word == "burn":
        if os.fork() == 0:
            while True: pass
        print("burning", flush=True)
    elif word == "eat":
        if os.fork() == 0:
            hoard = [bytearray(b"x") * 2**20 for _ in range(256)]
        print(os.wait()[1], flush=True)
    elif word == "write":
        file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
        for _ in range(4):
            os.pwrite(file, os.urandom(2**18), 0)
            os.fsync(file)
        print("written", flush=True)
"""

# A launcher that freezes a node of another parent, prints the place, and waits to be killed.
LAUNCHER = """
import sys
from pathlib import Path
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.core.actions import Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.limits.holds import Holds
from chaoskit.substrate.undo import UndoLog

pid = int(sys.argv[2])
node = [Process(pid, start_ticks(pid), "node")]
holds = Holds(UndoLog(Path(sys.argv[1])), lambda name: node, Path(sys.argv[1]), preferred_version=int(sys.argv[3]))
hold = holds.apply("node0", Freeze())
while not hold.shown(): pass
print(hold.path, flush=True)
sys.stdin.read()
"""


def needs(controller: str) -> pytest.MarkDecorator:
    """Return a marker that skips tests, with the reason, on a machine without the controller."""
    reason = unavailable(controller)
    return pytest.mark.skipif(bool(reason), reason=reason)


class Node:
    """A process tree that carries out commands."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", NODE, str(directory / "file")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> str:
        self.send(word)
        return self.answer()

    def processes(self, name: str = "") -> list[Process]:
        pids = [self.pid, *linux.descendants(self.pid)]
        return [
            Process(pid, linux.start_ticks(pid), "") for pid in pids if not linux.is_ending(pid)
        ]

    def end(self) -> None:
        for process in self.processes():
            linux.kill_if_same(process.pid, process.ticks, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.end()


@pytest.fixture
def holds(tmp_path: Path, node: Node, undo: UndoLog) -> Iterator[Holds]:
    holds = Holds(undo, node.processes, tmp_path)
    yield holds
    holds.release()
    assert groups_of_this_process() == []


def groups_of_this_process() -> list[Path]:
    """Return the groups that this process has made and not removed."""
    return list(Path("/sys/fs/cgroup").rglob(f"{PREFIX}{os.getpid()}-*"))


def group_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


# -- the freezer -----------------------------------------------------------------------------------


@needs("freezer")
@pytest.mark.parametrize("version", [1, 2])
def test_a_node_stands_still_and_goes_on(
    tmp_path: Path, node: Node, undo: UndoLog, version: int
) -> None:
    """Every process of a frozen node stops, and continues where it was, with either version of
    cgroup.
    """
    if cgroup.version("freezer", version) != version:
        pytest.skip(f"the freezer is not in cgroup v{version}")
    holds = Holds(undo, node.processes, tmp_path, preferred_version=version)
    child = int(node.ask("fork"))
    home = group_of(child)
    frozen = holds.apply("node0", Freeze())
    wait_until(frozen.shown, "the kernel to freeze the node")
    switches = linux.switches(child, child)
    node.send("fork")  # the frozen node does not even read it
    assert not select.select([node.process.stdout], [], [], 0.2)[0]
    assert linux.switches(child, child) == switches
    assert frozen.lift()
    assert int(node.answer()) > 0
    assert group_of(child) == home
    holds.release()
    assert groups_of_this_process() == []


@needs("cpu")
def test_what_a_node_starts_is_in_its_group(node: Node, holds: Holds) -> None:
    """A process that a held node starts is born into its group."""
    holds.apply("node0", CapCpu(0.5))
    child = int(node.ask("fork"))
    assert group_of(child) == group_of(node.pid)
    assert PREFIX in group_of(child)


@needs("freezer")
@pytest.mark.parametrize("version", [1, 2])
def test_the_guard_thaws_what_a_killed_launcher_froze(
    tmp_path: Path, node: Node, version: int
) -> None:
    """The launcher was killed while the node was frozen: the node continues, in the group from
    which it came.
    """
    home = group_of(node.pid)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(node.pid), str(version)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    path = Path(launcher.stdout.readline().strip())
    if not (path / ("freezer.state" if version == 1 else "cgroup.freeze")).is_file():
        launcher.communicate()
        sweep(tmp_path)
        pytest.skip(f"the freezer is not in cgroup v{version}")
    node.send("fork")
    assert not select.select([node.process.stdout], [], [], 0.2)[0]
    assert sweep(tmp_path) == [], "its launcher lives"
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not path.exists(), "the guard to remove the group")
    assert int(node.answer()) > 0
    assert group_of(node.pid) == home


# -- limits ----------------------------------------------------------------------------------------


@needs("cpu")
def test_a_limit_that_is_refused_leaves_the_others(node: Node, holds: Holds) -> None:
    """Limits of one controller share a group, which stays as long as one of them holds the node."""
    home = group_of(node.pid)
    with pytest.raises(HarnessError, match="refused"):
        holds.apply("node0", CapCpu(1e12))
    assert group_of(node.pid) == home
    limit = holds.apply("node0", CapCpu(0.2))
    with pytest.raises(HarnessError, match="refused"):
        holds.apply("node0", CapCpu(1e12))
    assert group_of(node.pid) != home
    assert limit.lift()
    assert group_of(node.pid) == home


@needs("cpu")
def test_two_processes_share_one_quota(node: Node, holds: Holds) -> None:
    """A quota of CPU holds all processes of a node together, and its count stays known after it is
    lifted.
    """
    limit = holds.apply("node0", CapCpu(0.2))
    node.ask("burn")
    node.ask("burn")
    wait_until(lambda: limit.shown() >= 3, "three throttled periods")
    assert limit.lift()
    counted = limit.shown()
    assert counted >= 3
    assert limit.lift()
    assert limit.shown() == counted


@pytest.mark.promise("the kernel counts processes of the node that it killed for want of memory")
@needs("memory")
def test_a_process_of_the_node_is_killed_for_its_memory(node: Node, holds: Holds) -> None:
    """A process that takes more memory than the node may have is killed and counted."""
    limit = holds.apply("node0", CapMemory(8 * MIB))
    assert limit.shown() == 0
    assert node.ask("eat") == str(signal.SIGKILL.value)
    assert limit.shown() == 1
    assert limit.lift()


@pytest.mark.promise("the kernel counts processes and threads that it refused")
@needs("pids")
def test_a_node_may_start_no_more(node: Node, holds: Holds) -> None:
    """A node may start as many processes as are allowed; refusals of the kernel are counted."""
    node.ask("fork")
    limit = holds.apply("node0", CapPids(1))
    assert node.ask("fork").isdecimal()
    assert limit.shown() == 0
    assert node.ask("fork") == "refused"
    assert node.ask("fork") == "refused"
    assert limit.shown() == 2
    assert limit.lift()
    assert node.ask("fork").isdecimal()


@pytest.mark.promise(
    "the kernel counts so many written bytes that the node used up what it may write"
)
@needs("io")
def test_writes_of_a_node_are_held_back(tmp_path: Path, node: Node, holds: Holds) -> None:
    """Writes of a node pass at the rate of the limit, and are counted as held back."""
    if device_of(tmp_path) is None:
        with pytest.raises(HarnessError, match="is on no disk"):
            holds.apply("node0", CapWrites(1e6))
        pytest.skip("temporary files lie on no disk")
    limit = holds.apply("node0", CapWrites(2 * MIB))
    assert limit.shown() == 0
    began_s = time.monotonic()
    node.send("write")
    wait_until(limit.shown, "writes that wait for the limit")
    assert node.answer() == "written"
    assert time.monotonic() - began_s > 0.3  # a MiB at two of them a second
    assert limit.lift()


@needs("pids")
@needs("cpu")
def test_two_limits_of_one_node_are_lifted_one_by_one(node: Node, holds: Holds) -> None:
    """Both limits are in one group with version 2."""
    burning, full = holds.apply("node0", CapCpu(0.5)), holds.apply("node0", CapPids(0))
    assert burning.lift()
    assert node.ask("fork") == "refused"
    assert full.lift()
    assert node.ask("fork").isdecimal()
    assert PREFIX not in group_of(node.pid)


@needs("cpu")
def test_what_the_kernel_refuses_is_told(node: Node, holds: Holds) -> None:
    """A limit that the kernel refuses is an error of the harness."""
    with pytest.raises(HarnessError, match="refused to apply CapCpu to node0"):
        holds.apply("node0", CapCpu(1e12))


def test_a_node_that_is_gone_is_not_held(tmp_path: Path, undo: UndoLog) -> None:
    """A node without processes cannot be held."""
    with pytest.raises(ProcessLookupError, match="node0 has no process any more"):
        Holds(undo, lambda name: [], tmp_path).apply("node0", Freeze())


# -- counting writes -------------------------------------------------------------------------------


def test_a_limit_that_is_used_up_counts_by_windows() -> None:
    """Windows in which the whole limit was used are counted; idle time is not."""
    saturation = Saturation(1000.0, 5000, 10.0)
    saturation.note(5000, 11.0)  # idle
    saturation.note(5240, 11.01)  # the first window
    assert saturation.windows == 0  # too early to say
    saturation.note(5250, 11.25)
    assert saturation.windows == 1
    saturation.note(5250, 14.0)  # idle again
    saturation.note(5260, 14.1)
    saturation.note(5350, 14.3)  # a third of what may pass
    assert saturation.windows == 1
    saturation.note(5360, 14.4)
    saturation.note(5700, 14.6)
    assert saturation.windows == 2


def test_a_file_system_without_a_disk_has_no_device() -> None:
    """A file system without a disk has no block device, so its writes cannot be limited."""
    assert device_of(Path("/proc")) is None
    device = device_of(Path("/"))
    assert device is None or Path(f"/sys/dev/block/{device}").exists()
