"""What the kernel tells about processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaoskit.osprocess import Starvation, signal_name, undisturbed

SPIN = "import os; os.sched_setaffinity(0, {%d}); %s\nwhile True: pass"
IDLE = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
DEADLINE_S = 30.0


@contextmanager
def spinning(cpu: int, how: str = "") -> Iterator[int]:
    """A process that wants all of one CPU."""
    process = subprocess.Popen([sys.executable, "-c", SPIN % (cpu, how)])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


STEP_BACK = """
import os, threading
from chaoskit.osprocess import step_back
wait = threading.Event()
threads = [threading.Thread(target=wait.wait) for _ in range(2)]
for thread in threads:
    thread.start()
before = {tid: os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir("/proc/self/task")}
step_back()
print([os.getpriority(os.PRIO_PROCESS, int(tid)) - nice for tid, nice in before.items()])
try:
    print(open("/proc/self/autogroup").read().split()[-1])
except OSError:
    print("none")
wait.set()
"""


def test_who_steps_back_does_so_with_all_threads_and_its_session() -> None:
    """Of a session of its own: with autogroups the niceness of a thread counts for nothing outside of it."""
    command = ["nice", "-n", "3", sys.executable, "-c", STEP_BACK]
    ended = subprocess.run(command, start_new_session=True, capture_output=True, text=True, check=True)
    steps, session = ended.stdout.splitlines()
    assert session in ("10", "none")
    assert steps in ("[10, 10, 10]", "[9, 9, 9]", "[8, 8, 8]", "[6, 6, 6]"), "19 is the end"


def _account(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()


def test_a_wait_for_a_cpu_counts_before_it_is_over() -> None:
    """The kernel charges it when the thread runs again: too late for whoever asks meanwhile."""
    cpu = min(os.sched_getaffinity(0))
    with spinning(cpu), spinning(cpu, IDLE) as starved:
        starvation, deadline_s = Starvation(starved, starved), time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < deadline_s, "it never waited for long"
            account, first_ns = _account(starved), starvation.read_ns()
            time.sleep(0.05)
            last_ns = starvation.read_ns()
            if account == _account(starved) and last_ns - first_ns > 40_000_000:
                break
        starvation.close()


def test_who_sleeps_is_not_starved() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sleeper:
        starvation, deadline_s = Starvation(sleeper.pid, sleeper.pid), time.monotonic() + DEADLINE_S
        while ") S " not in Path(f"/proc/{sleeper.pid}/stat").read_text():
            assert time.monotonic() < deadline_s
        before, account = starvation.read_ns(), _account(sleeper.pid)
        time.sleep(0.1)
        if account == _account(sleeper.pid):
            assert starvation.read_ns() == before
        sleeper.kill()
    assert starvation.read_ns() == 0  # it is gone


@pytest.mark.parametrize("pid", [2**22 + 1])
def test_nobody_is_not_starved(pid: int) -> None:
    assert Starvation(pid, pid).read_ns() == 0


def test_whoever_is_nicer_already_stays_so() -> None:
    """``nice pytest`` of an ordinary user: the kernel forbids the way back, and that must end no thread."""
    code = (
        "import os; from chaoskit.osprocess import lower_priority; os.setpriority(os.PRIO_PROCESS, 0, 19);"
        "os.getuid() or os.setuid(65534); lower_priority(10); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "19\n"


def test_nobody_disturbs_for_a_moment_only() -> None:
    before = os.sched_getscheduler(0)
    with undisturbed():
        during = os.sched_getscheduler(0)
    assert during == (os.SCHED_FIFO if os.getuid() == 0 else before)
    assert os.sched_getscheduler(0) == before


def test_an_ordinary_user_is_disturbed_as_ever() -> None:
    code = (
        "import os; from chaoskit.osprocess import undisturbed\nos.getuid() or os.setuid(65534)\n"
        "with undisturbed(): print(os.sched_getscheduler(0))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


@pytest.mark.parametrize(
    ("signum", "name"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGRTMIN, "SIGRTMIN"),
        (signal.SIGRTMIN + 1, "SIGRTMIN+1"),
        (signal.SIGRTMAX - 1, f"SIGRTMIN+{signal.SIGRTMAX - 1 - signal.SIGRTMIN}"),
        (signal.SIGRTMAX, "SIGRTMAX"),
        (signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN - 1}"),  # the C library keeps it for itself
        (99, "signal 99"),
    ],
)
def test_every_signal_has_a_name(signum: int, name: str) -> None:
    assert signal_name(signum) == name
