"""Tests of the load of the storm lane: it runs while the command runs, and is gone afterwards,
however that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import busy
from support.waiting import wait_until

from chaoskit.process.linux import descendants

BUSY = [sys.executable, busy.__file__]
COUNT = busy.SPINNERS_A_PROCESSOR * (os.cpu_count() or 1) + 1


def used_s(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def working(pid: int) -> list[int]:
    """Return the pids of the load's processes below ``pid``."""
    return [
        child
        for child in descendants(pid)
        if "--work" in Path(f"/proc/{child}/cmdline").read_text()
    ]


def test_each_process_of_the_load_works() -> None:
    """A load that sleeps would make the storm lane a calm one."""
    with busy.load() as pids:
        assert len(pids) == COUNT
        wait_until(
            lambda: all(used_s(pid) > 0.1 for pid in pids[:-1]),
            "all spinning processes use the processors",
        )
        wait_until(
            lambda: "write_bytes: 0" not in Path(f"/proc/{pids[-1]}/io").read_text(),
            "data on the disk",
        )
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_status_is_that_of_the_command() -> None:
    """A failing test run fails the lane."""
    assert subprocess.run([*BUSY, sys.executable, "-c", "exit(7)"], check=False).returncode == 7


def test_the_load_ends_when_its_parent_is_killed() -> None:
    """A cancelled run leaves no spinning process behind."""
    with subprocess.Popen([*BUSY, "sleep", "100"]) as process:
        wait_until(
            lambda: len(descendants(process.pid)) == COUNT + 1, "the load and the command run"
        )
        spinning = wait_until(  # a process has another command line until it has begun
            lambda: len(pids := working(process.pid)) == COUNT and pids,
            "all processes of the load have begun",
        )
        all_pids = descendants(process.pid)
        wait_until(lambda: all(used_s(pid) > 0.05 for pid in spinning[:-1]), "the load has begun")
        process.kill()
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in spinning),
            "the end of the load",
        )
        left = [pid for pid in all_pids if pid not in spinning]
        for pid in left:  # the load does not end the command: the lane itself does
            os.kill(pid, 9)
