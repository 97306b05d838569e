"""Tests of facts about processes that the kernel reports."""

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
from support.descriptors import many_open
from support.waiting import stays, wait_until

from chaoskit import Harness, Verdict
from chaoskit.process.linux import (
    Starvation,
    children,
    current_test,
    descendants,
    signal_name,
    undisturbed,
)
from faults import Kill

SPIN = "import os; os.sched_setaffinity(0, {%d}); %s\nwhile True: pass"
IDLE = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"


@contextmanager
def spinning(cpu: int, how: str = "") -> Iterator[int]:
    """Provide a process that would use all of one CPU."""
    process = subprocess.Popen([sys.executable, "-c", SPIN % (cpu, how)])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


STEP_BACK = """
import os, threading
from chaoskit.process.linux import step_back
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


def test_step_back_covers_all_threads_and_the_session() -> None:
    """All threads and the autogroup get nicer: with autogroups the niceness of a thread counts
    within its session.
    """
    command = ["nice", "-n", "3", sys.executable, "-c", STEP_BACK]
    ended = subprocess.run(
        command, start_new_session=True, capture_output=True, text=True, check=True
    )
    steps, session = ended.stdout.splitlines()
    assert session in ("10", "none")
    assert steps in ("[10, 10, 10]", "[9, 9, 9]", "[8, 8, 8]", "[6, 6, 6]"), "19 is the end"


def _account(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()


def test_a_wait_for_a_cpu_counts_before_it_is_over() -> None:
    """A wait for a CPU is counted while it lasts; the kernel adds it to its account when the thread
    runs again.
    """
    cpu = min(os.sched_getaffinity(0))
    with spinning(cpu), spinning(cpu, IDLE) as starved:
        starvation = Starvation(starved, starved)

        def grows_during_a_wait() -> bool:
            account, first_ns = _account(starved), starvation.read_ns()
            time.sleep(0.05)
            last_ns = starvation.read_ns()
            return account == _account(starved) and last_ns - first_ns > 40_000_000

        wait_until(grows_during_a_wait, "a wait of 40 ms that the kernel has not accounted yet")
        starvation.close()


SLEEPER = "print('ready', flush=True); input()"


def test_a_sleeping_process_is_not_starved() -> None:
    """A process that sleeps waits for no CPU, and one that is gone has not waited at all."""
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=-1, stdout=-1) as sleeper:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline()
        stat = Path(f"/proc/{sleeper.pid}/stat")
        wait_until(lambda: ") S " in stat.read_text(), "the process to sleep")
        starvation = Starvation(sleeper.pid, sleeper.pid)
        before = starvation.read_ns()
        stays(
            lambda: starvation.read_ns() == before, "what a sleeping process has waited", for_s=0.1
        )
        sleeper.kill()
    assert starvation.read_ns() == 0


@pytest.mark.parametrize("pid", [2**22 + 1])
def test_a_process_that_is_not_there_is_not_starved(pid: int) -> None:
    """A pid that no process can have has not waited."""
    assert Starvation(pid, pid).read_ns() == 0


def test_a_process_that_is_nicer_already_stays_so() -> None:
    """Under ``nice``, an ordinary user may not return to a lower niceness; the attempt must end no
    thread.
    """
    code = (
        "import os; from chaoskit.process.linux import lower_priority; os.setpriority(os.PRIO_PROCESS, 0, 19);"
        "os.getuid() or os.setuid(65534); lower_priority(10); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "19\n"
    )


RECALL = """
import os, sys
from pathlib import Path
from queue import SimpleQueue
from chaoskit.config import RunConfig
from chaoskit.daemon.replica_keeper import ReplicaKeeper
from chaoskit.daemon.keeper_base import NodeContext
from chaoskit.job import JobSpec
from chaoskit.journal import Journal
from chaoskit.process.linux import threads

begin, told = os.getpriority(os.PRIO_PROCESS, 0), SimpleQueue()
journal, config = Journal(Path(sys.argv[1]), "node0"), RunConfig(job=JobSpec("job.py"))
if os.getuid() == 0:
    os.setuid(65534)
keeper = ReplicaKeeper(NodeContext("node0", "127.0.0.1", "token", config, journal, told.put, told.put))
for number in range(2):
    keeper.recall(number)
    told.get(timeout=60.0)
(thread,) = [tid for tid, name in threads(os.getpid()).items() if name == "ck-keeper"]
print(os.getpriority(os.PRIO_PROCESS, thread) - begin)
"""


def test_the_keeper_of_an_ordinary_user_answers_at_the_priority_of_training(tmp_path: Path) -> None:
    """A user without CAP_SYS_NICE cannot lower a niceness again, so the keeper's thread never
    raises its own.
    """
    ended = subprocess.run(
        [sys.executable, "-c", RECALL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "0\n", ended.stderr


POLICY = "import os; print(os.sched_getscheduler(0))"
REAL_TIME = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"


def test_undisturbed_lasts_for_its_block_only() -> None:
    """The thread has real-time priority within the block, and its earlier policy afterwards. Its
    children do not inherit it.
    """
    asked = subprocess.run(
        [sys.executable, "-c", REAL_TIME], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        pytest.skip(f"real-time priority is not allowed here: {asked.stderr.splitlines()[-1]}")
    before = os.sched_getscheduler(0)
    with undisturbed():
        assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
        child = subprocess.run(
            [sys.executable, "-c", POLICY], capture_output=True, text=True, check=True
        )
    assert child.stdout.strip() == str(os.SCHED_OTHER), (
        "a helper that is started here would keep it for its life"
    )
    assert os.sched_getscheduler(0) == before


def test_an_ordinary_user_is_disturbed_as_ever() -> None:
    """A user without the right to real-time priority keeps the usual policy."""
    code = (
        "import os; from chaoskit.process.linux import undisturbed\nos.getuid() or os.setuid(65534)\n"
        "with undisturbed(): print(os.sched_getscheduler(0))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "0\n"
    )


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
    """Real-time signals and unknown numbers have names, too."""
    assert signal_name(signum) == name


STARTS = """
import subprocess, threading
def start():
    process = subprocess.Popen(["sleep", "1000"])
    print(process.pid, flush=True)
    process.wait()
threading.Thread(target=start).start()
"""


def test_what_any_thread_has_started_is_a_child() -> None:
    """Launchers start ranks from threads; the kernel lists children by the thread that started
    them.
    """
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", STARTS], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert children(process.pid) == [child]
        assert descendants(process.pid) == [child]
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.costly
def test_a_session_with_many_open_files_runs_jobs(tmp_path: Path) -> None:
    """A long test session, or a process that trains, may have more than 1,023 files open, the limit
    of ``select``.
    """
    with many_open(), Harness(directory=tmp_path) as harness:
        outcome = harness.run(
            "gpt",
            nodes=2,
            spares=1,
            steps=6,
            options={"size": "tiny"},
            faults=[Kill(rank=1, at_step=3)],
            twin=False,
        )
    assert outcome.verdict == Verdict.PASSED, outcome.reasons


def test_the_current_test_is_named_as_pytest_names_it(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_test() == request.node.nodeid
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/a.py::test_b[x (y)] (setup)")
    assert current_test() == "tests/a.py::test_b[x (y)]"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert current_test() == "", "outside of a test"
