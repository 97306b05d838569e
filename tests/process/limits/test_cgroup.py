"""Tests of control groups: the kernel enforces the limits, and no group is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until

from chaoskit.errors import HarnessError
from chaoskit.process import linux
from chaoskit.substrate.core.actions import CapProcessCpu, CapProcessMemory
from chaoskit.substrate.limits.cgroup import Cgroup, CgroupPlace, find_place, unavailable
from chaoskit.substrate.limits.holds import ProcessHolds
from chaoskit.substrate.undo import Repair, RepairOutcome, UndoLog, describe, sweep
from chaoskit.substrate.undo.entries import PREFIX, remove_cgroup

MIB = 2**20
BURNING = "while True: pass"
EATING = "import sys; sys.stdin.read(1); hoard = [bytearray(b'x') * 2**20 for _ in range(256)]"

# A launcher that limits a process of another parent, prints the place, and waits to be killed.
LAUNCHER = """
import sys
from pathlib import Path
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.core.actions import CapProcessCpu
from chaoskit.substrate.limits.holds import ProcessHolds
from chaoskit.substrate.undo import UndoLog

pid, undo = int(sys.argv[2]), UndoLog(Path(sys.argv[1]))
limit = ProcessHolds(undo).apply("node0", CapProcessCpu(pid, start_ticks(pid), 0.5))
print(limit.path, undo.guard_pid, flush=True)
sys.stdin.read()
"""

# A launcher in the middle of a run in which rank 1, or its node, is held back for a very long time.
RUNNING = """
import sys
from pathlib import Path
from chaoskit.config import DETECTION
from chaoskit.experiment.harness import Harness
from chaoskit.substrate.local import LocalSubstrate
from faults import *

fault = eval(sys.argv[2])
Harness(LocalSubstrate(), Path(sys.argv[3])).run(
    sys.argv[1], nodes=2, spares=0, steps=10**6, options={"step_s": 0.01}, faults=[fault], twin=False,
    **DETECTION["relaxed"],
)
"""


def needs(controller: str) -> pytest.MarkDecorator:
    """Return a marker that skips tests, with the reason, on a machine without the controller."""
    reason = unavailable(controller)
    return pytest.mark.skipif(bool(reason), reason=reason)


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Provide a function that starts Python processes, which are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def groups(process: subprocess.Popen[bytes]) -> str:
    """Return the control groups of a process, as the kernel lists them."""
    return Path(f"/proc/{process.pid}/cgroup").read_text()


def leftover_groups(pid: int) -> list[Path]:
    """Return the groups that the launcher ``pid`` has made and not removed."""
    walk = os.walk(
        "/sys/fs/cgroup"
    )  # unlike rglob, os.walk passes over groups of other tests that vanish meanwhile
    return [
        Path(parent, name)
        for parent, names, _ in walk
        for name in names
        if name.startswith(f"{PREFIX}{pid}-")
    ]


# -- limits ----------------------------------------------------------------------------------------


@needs("cpu")
def test_a_quota_throttles_and_is_lifted(
    start: Callable[[str], subprocess.Popen[bytes]], undo: UndoLog
) -> None:
    """A process above its quota is throttled and counted, and runs freely once the quota is
    lifted.
    """
    process = start(BURNING)
    home = groups(process)
    group = Cgroup("cpu", process.pid, linux.start_ticks(process.pid), undo)
    group.limit_cpu(0.2)
    assert group.path.name in groups(process)
    wait_until(
        lambda: group.throttled()[0] >= 3 and group.throttled()[1] > 0.01, "three throttled periods"
    )
    group.limit_cpu(None)
    before = group.throttled()[0]
    ticks = linux.cpu_ticks(process.pid, process.pid) or 0
    # five periods of the quota
    wait_until(
        lambda: (linux.cpu_ticks(process.pid, process.pid) or 0) >= ticks + 10, "100 ms of CPU time"
    )
    assert group.throttled()[0] <= before + 1
    assert group.remove()
    assert not group.path.exists()
    assert groups(process) == home
    assert process.poll() is None


@needs("memory")
def test_a_process_that_takes_too_much_is_killed(
    start: Callable[[str], subprocess.Popen[bytes]], undo: UndoLog
) -> None:
    """A process above its limit of memory is killed by the kernel and counted."""
    process = start(EATING)
    holds = ProcessHolds(undo)
    limit = holds.apply(
        "node0", CapProcessMemory(process.pid, linux.start_ticks(process.pid), 8 * MIB)
    )
    assert limit.shown() == 0
    process.communicate(b"x")
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: limit.shown() == 1, "the count of the kernel")
    holds.close()
    assert not limit.path.exists()
    assert limit.shown() == 1, "what was counted stays known"


def test_a_group_of_cgroup_v2(
    start: Callable[[str], subprocess.Popen[bytes]], undo: UndoLog
) -> None:
    """The group is made, entered, left and removed, whatever controllers the hierarchy has."""
    if "cgroup2" not in Path("/proc/self/mounts").read_text():
        pytest.skip("cgroup v2 is not mounted")
    process = start(BURNING)
    home = groups(process)
    group = Cgroup("none of version 1", process.pid, linux.start_ticks(process.pid), undo)
    assert group.path.name in groups(process)
    assert group.remove()
    assert groups(process) == home


@needs("cpu")
def test_a_group_that_the_kernel_refuses_is_not_left_behind(
    start: Callable[[str], subprocess.Popen[bytes]], undo: UndoLog
) -> None:
    """A group is removed if the kernel refuses its limit."""
    process = start(BURNING)
    with pytest.raises(HarnessError, match=r"Invalid argument|out of range"):
        ProcessHolds(undo).apply(
            "node0", CapProcessCpu(process.pid, linux.start_ticks(process.pid), 1e12)
        )
    assert leftover_groups(os.getpid()) == []


def test_another_process_with_this_pid_is_left_alone(
    start: Callable[[str], subprocess.Popen[bytes]], undo: UndoLog
) -> None:
    """A process that has got the pid of the intended one is put into no group."""
    process = start(BURNING)
    ticks = (linux.start_ticks(process.pid) or 0) + 1
    with pytest.raises(ProcessLookupError):
        ProcessHolds(undo).apply("node0", CapProcessCpu(process.pid, ticks, 0.5))
    assert leftover_groups(os.getpid()) == []


# -- undo ------------------------------------------------------------------------------------------


@needs("cpu")
def test_the_group_of_a_killed_launcher_is_removed(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    """Processes of the group return to their earlier group, and live."""
    process = start(BURNING)
    home = groups(process)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    printed_path, guard = launcher.stdout.readline().split()
    path = Path(printed_path)
    assert sweep(tmp_path) == [], "its launcher lives"
    assert path.name in groups(process)
    os.kill(int(guard), signal.SIGKILL)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: linux.is_ending(int(guard)), "the end of the guard")
    repairs: list[Repair] = []
    wait_until(
        lambda: repairs.extend(sweep(tmp_path)) or repairs,
        "the end of its lock, which is a moment later",
    )
    assert repairs == [Repair("cgroup", str(path), RepairOutcome.REPAIRED)]
    assert describe(repairs[0]) == f"removed {path}, left behind"
    assert not path.exists()
    assert groups(process) == home
    assert process.poll() is None
    assert sweep(tmp_path) == []


@pytest.mark.slow
@pytest.mark.promise(
    "puts back what a killed run left behind",
    fault="LimitCpu(rank=1, at_step=2, lift_after_s=3600.0)",
)
@pytest.mark.costly
@needs("cpu")
@needs("freezer")
@pytest.mark.parametrize(
    "fault",
    [
        "Straggle(rank=1, at_step=2, how='quota', steps=10**6)",
        "FreezeNode(rank=1, at_step=2, how='cgroup', thaw_after_s=3600.0)",
        "LimitCpu(rank=1, at_step=2, lift_after_s=3600.0)",
    ],
)
def test_a_launcher_killed_in_the_middle_of_a_run_leaves_no_group(
    tmp_path: Path, fault: str
) -> None:
    job = f"{Path(__file__).parents[2]}/jobs/failing/troubled.py:plain"
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path))
    launcher = subprocess.Popen(
        [sys.executable, "-c", RUNNING, job, fault, str(tmp_path / "runs")], env=environment
    )
    try:
        wait_until(
            lambda: leftover_groups(launcher.pid) or launcher.poll() is not None,
            "the group of the fault",
        )
        assert launcher.poll() is None
        pids = linux.descendants(launcher.pid)
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not leftover_groups(launcher.pid), "the guard to remove the group")
    wait_until(lambda: all(linux.is_ending(pid) for pid in pids), "the end of all processes")


def test_a_group_that_was_never_made_needs_no_undo(tmp_path: Path) -> None:
    """The launcher ended after it had written its undo entry, and before it made the group."""
    code = (
        "import os, signal, sys; from pathlib import Path; from chaoskit.substrate.undo import CgroupEntry, UndoLog\n"
        "undo = UndoLog(Path(sys.argv[1]))\n"
        "undo.plan(CgroupEntry('/sys/fs/cgroup/chaoskit-0-0-0', '/sys/fs/cgroup'))\n"
        "os.kill(undo.guard_pid, signal.SIGKILL); os.waitpid(undo.guard_pid, 0); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert sweep(tmp_path) == [
        Repair("cgroup", "/sys/fs/cgroup/chaoskit-0-0-0", RepairOutcome.NOTHING_LEFT)
    ]


@needs("cpu")
def test_what_does_not_bear_our_name_is_never_removed(undo: UndoLog) -> None:
    """Groups without chaoskit's prefix are never removed."""
    place = find_place(
        "cpu", Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
    )
    assert place is not None
    foreign = place.parent / f"foreign-{os.getpid()}"
    foreign.mkdir()
    try:
        assert not remove_cgroup(foreign, place.home)
        assert foreign.is_dir()
    finally:
        foreign.rmdir()


# -- where groups are ------------------------------------------------------------------------------

V1 = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
BLKIO = "cgroup /sys/fs/cgroup/blkio cgroup rw,blkio 0 0\n"
FREEZER = "cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0\n"
HYBRID = V1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"


@pytest.mark.parametrize(
    ("controller", "mounts", "groups", "place"),
    [
        (
            "cpu",
            V1,
            "3:cpu,cpuacct:/\n2:memory:/box/7\n",
            CgroupPlace(1, *[Path("/sys/fs/cgroup/cpu,cpuacct")] * 2),
        ),
        (
            "memory",
            HYBRID,
            "3:cpu,cpuacct:/\n2:memory:/box/7\n0::/x\n",
            CgroupPlace(1, Path("/sys/fs/cgroup/memory/box/7"), Path("/sys/fs/cgroup/memory/box")),
        ),
        (
            "cpu",
            V2,
            "0::/user.slice/session-1.scope\n",
            CgroupPlace(
                2,
                Path("/sys/fs/cgroup/user.slice/session-1.scope"),
                Path("/sys/fs/cgroup/user.slice"),
            ),
        ),
        ("cpu", V2, "0::/\n", CgroupPlace(2, Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup"))),
        (
            "pids",
            HYBRID,
            "0::/x\n",
            CgroupPlace(2, Path("/sys/fs/cgroup/unified/x"), Path("/sys/fs/cgroup/unified")),
        ),
        ("pids", V1, "3:cpu,cpuacct:/\n", None),
        (
            "io",
            BLKIO,
            "7:blkio:/box\n",
            CgroupPlace(1, Path("/sys/fs/cgroup/blkio/box"), Path("/sys/fs/cgroup/blkio")),
        ),
        (
            "freezer",
            FREEZER,
            "6:freezer:/\n",
            CgroupPlace(1, *[Path("/sys/fs/cgroup/freezer")] * 2),
        ),
        (
            "freezer",
            FREEZER + V2,
            "6:freezer:/\n0::/\n",
            CgroupPlace(2, *[Path("/sys/fs/cgroup")] * 2),
        ),
        ("cpu", "proc /proc proc rw 0 0\n", "", None),
    ],
)
def test_the_place_of_a_process(
    controller: str, mounts: str, groups: str, place: CgroupPlace | None
) -> None:
    """Groups are made beside that of the process; cgroup v1 is preferred if a controller is in both
    versions.

    The freezer is an exception: processes that version 2 has frozen can still be killed.
    """
    assert find_place(controller, mounts, groups) == place


def test_a_machine_without_control_groups_says_so(tmp_path: Path) -> None:
    """The test runs in a mount namespace without any hierarchy.

    A plan with two forms can be made, and is refused before anything starts.
    """
    code = (
        "import sys\n"
        "from faults import OutOfMemory, Straggle\n"
        "from chaoskit.experiment.harness import Harness\n"
        "from chaoskit.errors import BadInput\n"
        "from chaoskit.experiment.plan.plan import plan_experiment\n"
        "for fault in (Straggle(rank=0, at_step=1, how='quota'), OutOfMemory(rank=0, at_step=1)):\n"
        "    print(type(fault).restricted())\n"
        "    plan = plan_experiment('gpt', steps=4, faults=[fault])\n"
        "    with Harness('local', sys.argv[1]) as harness:\n"
        "        try: harness.run_planned(plan)\n"
        "        except BadInput as error: print(error)\n"
        "others = [Straggle(rank=0, at_step=1, how='duty'), OutOfMemory(rank=0, at_step=1, how='error')]\n"
        "plan_experiment('gpt', steps=4, faults=others)\n"
    )
    hide = (
        'umount -l /sys/fs/cgroup; if grep -q cgroup /proc/mounts; then exit 9; fi; exec "$0" "$@"'
    )
    command = ["unshare", "-m", "sh", "-c", hide, sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in ran.stderr or ran.returncode == 9:
        pytest.skip(f"no mount namespace here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "how='quota' only: no cgroup hierarchy with the cpu controller is mounted"
    assert lines[1].endswith(
        "leave it out, or use another form: no cgroup hierarchy with the cpu controller is mounted"
    )
    assert (
        lines[2] == "how='cgroup' only: no cgroup hierarchy with the memory controller is mounted"
    )
    assert (
        "leave it out, or use another form: no cgroup hierarchy with the memory controller"
        in lines[3]
    )
    assert list(tmp_path.iterdir()) == []
