"""Tests of the helper that starts ranks for tests: they have one thread, and end with their test
session.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import ranks
from support.waiting import wait_until

from chaoskit.process import linux


class Number:
    """A value of a class of this module."""

    def __init__(self, value: int) -> None:
        self.value = value


def add(line: ranks.Line, number: Number) -> Number:
    line.send(Number(line.rank))
    return Number(number.value + line.receive() + line.rank)


def test_ranks_run_a_function_of_the_test_and_talk_to_it() -> None:
    """Arguments, messages and results pass in both directions, also for classes of the test."""
    started = ranks.start(3, add, Number(100))
    try:
        assert [number.value for number in started.receive()] == [0, 1, 2]
        started.send(10)
        assert [rank.result().value for rank in started] == [110, 111, 112]
        assert [rank.wait() for rank in started] == [0, 0, 0]
    finally:
        started.destroy()


def fail(line: ranks.Line) -> None:
    raise ValueError("of this rank")


def test_an_error_of_a_rank_is_the_error_of_its_test() -> None:
    """The error has the traceback of the rank."""
    with pytest.raises(AssertionError, match="ValueError: of this rank"), ranks.running(1, fail):
        pass


def wait_for_ever(line: ranks.Line) -> None:
    if line.rank == 1:
        raise ValueError("of this rank")
    line.receive()


def test_an_error_of_a_rank_is_not_waited_for_behind_another_one() -> None:
    """A rank that fails is reported at once, even if a rank with a lower number waits for it."""
    with pytest.raises(AssertionError, match="ValueError: of this rank"):
        ranks.results(2, wait_for_ever)


def end_early(line: ranks.Line) -> None:
    line.send("last words")
    os._exit(3)


def test_a_rank_that_ends_early_is_noticed() -> None:
    """Messages that it sent before are not lost."""
    with ranks.one(end_early) as rank:
        assert rank.receive() == "last words"
        with pytest.raises(ranks.RankEnded, match="exit code 3"):
            rank.receive()


def wait_on_a_lock(line: ranks.Line) -> None:
    line.send("soon")
    threading.Event().wait()


def test_a_rank_that_is_late_tells_where_it_is() -> None:
    """The error has the stack of the rank, which is ended by the signal that asked for the
    stack.
    """
    with ranks.one(wait_on_a_lock) as rank:
        assert rank.receive() == "soon"
        with pytest.raises(AssertionError, match="in wait_on_a_lock"):
            rank.receive(limit_s=0.1)
        assert rank.wait() == -signal.SIGTERM


def fail_while_another_waits(line: ranks.Line) -> None:
    if line.rank:
        raise ValueError("rank 1 has a reason")
    line.receive()


def test_the_rank_that_fails_is_named_and_not_one_that_waits_for_it() -> None:
    """Rank 0 sends nothing as long as its test lives."""
    with (
        pytest.raises(AssertionError, match="rank 1 has a reason"),
        ranks.running(2, fail_while_another_waits),
    ):
        pass


def count(line: ranks.Line, shared: ranks.Counters) -> None:
    while True:
        shared[0] += 1


def test_a_counter_outlives_its_rank() -> None:
    """The test can read how far a killed rank came."""
    shared = ranks.counters(1)
    with ranks.one(count, shared) as rank:
        wait_until(lambda: shared[0] > 100, "a rank that counts")
        rank.kill()
        assert rank.wait() == -signal.SIGKILL
    assert shared[0] > 100


SESSION = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from support import ranks
import tests_of_a_session

if __name__ == "__main__":
    started = ranks.start(2, tests_of_a_session.live)
    print(os.getpid(), *started.receive(), flush=True)
    time.sleep(600)
"""
BODY = """
import os, signal, time

def live(line):
    line.send(f"{os.getpid()} {os.getppid()}")
    if line.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["session", "server"])
def test_nothing_outlives_the_session(tmp_path: Path, victim: str) -> None:
    """SIGKILL of pytest's process, or of the server, ends all ranks, even a stopped one."""
    (tmp_path / "tests_of_a_session.py").write_text(BODY)
    script = tmp_path / "session.py"
    script.write_text(SESSION)
    command = [sys.executable, str(script), str(Path(__file__).parents[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        pids = [int(word) for word in session.stdout.readline().split()]
        try:
            assert len(set(pids)) == 4  # itself, two ranks, and twice the server
            assert session.pid == pids[0]
            os.kill(pids[0] if victim == "session" else pids[2], signal.SIGKILL)
            wait_until(
                lambda: all(linux.is_ending(pid) for pid in pids[1:]),
                "the end of the server and its ranks",
            )
        finally:
            session.kill()
            for pid in pids[1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def report(line: ranks.Line) -> tuple[int, list[str]]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return len(os.listdir("/proc/self/task")), links


def test_a_rank_inherits_nothing_of_its_test() -> None:
    """A rank inherits no thread and no descriptor of the test's process."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    try:
        ((threads, links),) = ranks.results(1, report)
        assert threads == 1
        assert os.readlink(f"/proc/self/fd/{reader}") not in links
    finally:
        os.close(reader)
        os.close(writer)
