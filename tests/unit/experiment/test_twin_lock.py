"""The lock of a twin: two processes that need the same twin train it once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.waiting import stays, wait_until

from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.twin.twin import TwinCache

HOLD = """
import sys
from pathlib import Path
from chaoskit.experiment.plan.plan import plan_experiment
from chaoskit.experiment.twin.twin import TwinCache
directory, steps = Path(sys.argv[1]), int(sys.argv[2])
print("waits", flush=True)
with TwinCache(directory).lock(plan_experiment("gpt", steps=steps)):
    print("has it", flush=True)
    sys.stdin.readline()
"""


def holder(directory: Path, steps: int) -> subprocess.Popen[str]:
    """Start a process that takes the lock and keeps it until it reads a line."""
    command = [sys.executable, "-c", HOLD, str(directory), str(steps)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process


def waits_for_a_lock(pid: int) -> bool:
    """Return whether the kernel lists the process among those blocked by another process's lock."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(fields[1] == "->" and int(fields[5]) == pid for fields in lines)


def test_one_process_at_a_time_trains_a_twin(tmp_path: Path) -> None:
    """The second process waits, and gets the lock when the first is killed.

    Another twin is free meanwhile.
    """
    first, second = holder(tmp_path, 3), None
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n"
        second = holder(tmp_path, 3)
        wait_until(
            lambda: waits_for_a_lock(second.pid), "the second process is blocked by the first"
        )
        with TwinCache(tmp_path).lock(plan_experiment("gpt", steps=4)):
            stays(lambda: waits_for_a_lock(second.pid), "the second process waits", for_s=0.1)
        first.kill()
        assert second.stdout is not None
        assert second.stdout.readline() == "has it\n"
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()
