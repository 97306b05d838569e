"""Tests of the progress board and its life latch, between real processes."""

from __future__ import annotations

import itertools
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from support import ranks
from support.clocks import FakeClock
from support.waiting import LIMIT_S, stays, wait_until

from chaoskit.process import linux
from chaoskit.process.progress_board import Board, Spent
from chaoskit.vocabulary import Phase

STILL_S = 0.2  # how long a state must stay unchanged


class Worker:
    """A process with the board in a mapping of its own, which carries out orders one after
    another.
    """

    def __init__(self, rank: ranks.Rank) -> None:
        self._rank = rank
        self.pid = rank.pid

    def act(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Have the worker call ``act(board, *arguments)``; return the result."""
        self.begin(act, *arguments)
        return self._rank.receive()

    def begin(self, act: Callable[..., Any], *arguments: Any) -> None:
        """Have the worker call ``act(board, *arguments)`` without waiting for the result."""
        self._rank.send((act, arguments))

    def stop(self) -> None:
        self._rank.signal(signal.SIGSTOP)
        self._rank.await_state("T")

    def signal(self, signum: int) -> None:
        self._rank.signal(signum)

    def kill(self) -> None:
        self._rank.kill()

    def await_end(self) -> None:
        self._rank.wait()


def obey(line: ranks.Line, board_fd: DupFd) -> None:
    """Carry out orders, as a worker process."""
    board = Board(board_fd.detach())
    while True:
        act, arguments = line.receive()
        line.send(act(board, *arguments))


@contextmanager
def worker_of(board: Board) -> Iterator[Worker]:
    """Provide a worker process, which is gone afterwards."""
    with ranks.one(obey, DupFd(board.fd)) as rank:
        yield Worker(rank)


class Watch:
    """A thread that waits for the latch, as an agent does. The constructor returns once it
    waits.

    Args:
        on_death: called when the wait has ended; :attr:`result` is its result.
        cpu: on which it runs; None for any.
    """

    def __init__(
        self,
        board: Board,
        on_death: Callable[[], object] = lambda: None,
        *,
        cpu: int | None = None,
        waits: bool = True,
    ) -> None:
        self._board, self._on_death, self._cpu = board, on_death, cpu
        self.result: object = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        if waits:
            wait_until(self._waits, "a thread that waits for the latch")

    def _wait(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})  # of this thread
        self._board.await_death()
        self.result = self._on_death()
        self.ended.set()

    def _waits(self) -> bool:
        """Return whether the kernel has put the thread to sleep on an address of some board's
        page.
        """
        assert not self.ended.is_set(), "the latch is broken"
        call = Path(f"/proc/self/task/{self._thread.native_id}/syscall").read_text().split()
        if len(call) < 2:  # the thread runs
            return False
        pages = [
            line.split()[0]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if BOARD_NAME in line
        ]
        ranges = [[int(end, 16) for end in page.split("-")] for page in pages]
        return any(start <= int(call[1], 16) < end for start, end in ranges)

    def holds(self) -> None:
        """Check that the latch stays whole for a while."""
        stays(lambda: not self.ended.is_set(), "the latch is whole", for_s=STILL_S)


BOARD_NAME = "memfd:chaoskit-board"


def test_a_fresh_board_shows_nothing() -> None:
    """There is no pid and no rank before a worker signs on."""
    board = Board.create()
    assert (board.pid, board.tid, board.rank, board.generation, board.step, board.commits) == (
        0,
        0,
        -1,
        0,
        0,
        0,
    )
    assert board.trained_in == 0
    assert board.phase is Phase.START
    assert board.loss == 0.0


def test_another_process_sees_phase_place_and_progress() -> None:
    """Everything that the worker's main thread writes can be read at once in the process that made
    the board.
    """
    board = Board.create()
    with worker_of(board) as worker:
        before_ns = time.monotonic_ns()
        worker.act(Board.sign_on)
        assert (board.pid, board.tid, board.phase) == (worker.pid, worker.pid, Phase.START)
        assert before_ns <= board.since_ns <= time.monotonic_ns()
        assert board.rank == -1
        worker.act(Board.place, 7, 3)
        assert (board.generation, board.rank) == (7, 3)
        before_ns = time.monotonic_ns()
        assert board.since_ns < before_ns
        worker.act(Board.enter, Phase.BACKWARD)
        assert board.phase == Phase.BACKWARD
        assert before_ns <= board.since_ns <= time.monotonic_ns()
        worker.act(Board.progress, 12, 0.1)
        assert (board.step, board.commits, board.loss, board.trained_in) == (12, 1, 0.1, 7)
        worker.act(Board.progress, 13, -math.pi)
        assert (board.step, board.commits, board.loss) == (13, 2, -math.pi)
        worker.act(Board.progress, 20)
        assert (board.step, board.commits, board.loss) == (20, 2, -math.pi), (
            "adopted steps are not its own commits"
        )
        worker.act(Board.enter, Phase.DONE)
        assert (board.phase, board.generation, board.rank, board.step) == (Phase.DONE, 7, 3, 20)


def test_the_longest_phase_that_ended_by_itself_is_shown_for_each_kind() -> None:
    """The order is forward, backward, optimizer. Time that a rank waits for others is no phase of
    its own.
    """
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.sign_on)
        worker.act(Board.place, 1, 0)
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER):
            worker.act(Board.enter, phase)
        assert board.longest_ms == (0.0, 0.0, 0.0), (
            "the first step of a generation has limits of its own"
        )
        worker.act(Board.progress, 1, 0.1)
        for phase in (Phase.FORWARD, Phase.REDUCE):
            worker.act(Board.enter, phase)
        forward_ms, *others = board.longest_ms
        assert forward_ms > 0
        assert others[0] == 0
        worker.act(Board.enter, Phase.BACKWARD)
        began_ns = time.monotonic_ns()
        wait_until(lambda: time.monotonic_ns() - began_ns > 50_000_000, "50 ms have passed")
        worker.act(Board.enter, Phase.FORWARD)
        assert board.longest_ms[1] >= 50
        worker.act(Board.enter, Phase.BACKWARD)
        worker.act(Board.enter, Phase.REDUCE)
        assert board.longest_ms[1] >= 50, "a shorter one changes nothing"
        before = board.longest_ms
        worker.act(Board.place, 2, 0)
        for phase in (Phase.BACKWARD, Phase.REDUCE):
            worker.act(Board.enter, phase)
        assert board.longest_ms == before, "the first step of generation 2 was not committed"


def spend_for_ever(board: Board) -> None:
    """Write in bursts: a writer that never pauses loses its CPU in the middle of a write again and
    again.
    """
    for number in itertools.count(1):
        board.spend([number] * len(Spent._fields))
        if not number % 20:
            os.sched_yield()


def test_where_the_time_went_is_seen_whole_or_not_at_all() -> None:
    """Six numbers that belong together are read together, or as None, while a writer runs at full
    speed.
    """
    board = Board.create()
    assert board.spent is None, "nothing was measured yet"
    with worker_of(board) as worker:
        worker.begin(spend_for_ever)
        readings: set[Spent] = set()

        def look() -> bool:
            readings.update(
                spent for spent in (board.spent for _ in range(1000)) if spent is not None
            )
            return len(readings) >= 100

        wait_until(look, "a hundred readings")
        assert {len(set(spent)) for spent in readings} == {1}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.0, 5e-324, 1.7976931348623157e308])
def test_a_loss_keeps_its_bits(loss: float) -> None:
    """Any float passes unchanged, including the values of a broken run."""
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.progress, 1, loss)
        assert struct.pack("d", board.loss) == struct.pack("d", loss)


ONES, ZEROS = 0x0101010101010101, 0


def write_for_ever(board: Board) -> None:
    while True:
        board.progress(ONES)
        board.progress(ZEROS)


def test_a_reader_never_sees_half_a_number() -> None:
    """Every value that is read beside a writer at full speed is one that was written."""
    board = Board.create()
    with worker_of(board) as worker:
        worker.begin(write_for_ever)
        steps: set[int] = set()

        def look() -> bool:
            steps.update(board.step for _ in range(50_000))
            return len(steps) > 1

        wait_until(look, "both values")
        assert steps == {ONES, ZEROS}


held: list[bytearray] = []


def sign_on_with_memory(board: Board, cpu: int) -> None:
    """Hold 200 MB, on one CPU and with the lowest priority there."""
    held.append(bytearray(b"\x01") * (200 * 2**20))
    board.sign_on()
    os.sched_setaffinity(0, {cpu})
    os.nice(19)


def test_a_kill_breaks_the_latch_before_the_process_has_ended() -> None:
    """The latch shows a death before the memory of the process is freed, and so before its parent
    can know.

    The watching thread has the same CPU and a higher priority: from the moment at which it is woken
    the process has about a hundredth of that CPU, too little to free 200 MB before the thread
    looks.
    """
    board, cpu = Board.create(), min(os.sched_getaffinity(0))
    with worker_of(board) as worker:
        worker.act(sign_on_with_memory, cpu)
        pidfd = os.pidfd_open(worker.pid)
        try:
            watch = Watch(board, lambda: bool(select.select([pidfd], [], [], 0)[0]), cpu=cpu)
            watch.holds()
            worker.kill()
            assert watch.ended.wait(LIMIT_S)
            assert watch.result is False, "the parent of the process could know as early"
            assert select.select([pidfd], [], [], LIMIT_S)[0]
        finally:
            os.close(pidfd)


def _exit_in_order(_: Board) -> None:
    os._exit(0)


def _end_by_signal(_: Board) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [_exit_in_order, _end_by_signal])
def test_any_end_breaks_the_latch(end: Callable[[Board], object]) -> None:
    """A worker that ends by itself, in order or not, is noticed the same way."""
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.sign_on)
        watch = Watch(board)
        watch.holds()
        worker.begin(end)
        assert watch.ended.wait(LIMIT_S)


def test_a_latch_that_broke_before_is_seen_at_once() -> None:
    """An agent that begins to watch a dead worker does not wait for ever."""
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.sign_on)
        worker.kill()
        worker.await_end()
        assert Watch(board, waits=False).ended.wait(LIMIT_S)


def test_a_stopped_worker_is_not_dead() -> None:
    """SIGSTOP leaves the latch whole, SIGCONT changes nothing, and the death of a stopped worker is
    noticed.
    """
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.sign_on)
        watch = Watch(board)
        worker.stop()
        watch.holds()
        worker.signal(signal.SIGCONT)
        worker.act(Board.progress, 1)
        assert board.step == 1
        assert not watch.ended.is_set()
        worker.stop()
        worker.kill()
        assert watch.ended.wait(LIMIT_S)


def run_thread(_: Board) -> None:
    thread = threading.Thread(target=os.getpid)
    thread.start()
    thread.join()


def run_process(_: Board) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def test_only_the_thread_that_signed_on_counts() -> None:
    """Other threads and children of the worker come and go without breaking its latch."""
    board = Board.create()
    with worker_of(board) as worker:
        worker.act(Board.sign_on)
        watch = Watch(board)
        worker.act(run_thread)
        worker.act(run_process)
        watch.holds()
        assert linux.state(worker.pid) == "S"
        worker.kill()
        assert watch.ended.wait(LIMIT_S)


FRESH = """
import sys
from chaoskit.process.progress_board import Board
from chaoskit.vocabulary import Phase
board = Board(int(sys.argv[1]))
board.sign_on()
board.enter(Phase.FORWARD)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_fresh_interpreter_can_use_the_board() -> None:
    """A worker started with exec instead of fork that gets the descriptor shows its progress and
    its death, too.
    """
    board = Board.create()
    with subprocess.Popen(
        [sys.executable, "-c", FRESH, str(board.fd)],
        pass_fds=[board.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
            assert (board.pid, board.phase) == (worker.pid, Phase.FORWARD)
            watch = Watch(board)
            watch.holds()
        finally:
            worker.kill()
        assert watch.ended.wait(LIMIT_S)


def board_with(clock: FakeClock) -> Board:
    return Board(Board.create().fd, now_s=clock.now_s, sleep=clock.sleep)


def test_a_copy_of_the_initial_state_is_waited_for_like_any_other() -> None:
    """Even step 0 does not count as copied before it is."""
    clock = FakeClock()
    board = board_with(clock)
    board.copying(True)
    for step in range(2):
        with clock.measured() as waited:
            board.await_copy(step, 0.05, 0.0)
        assert waited.duration_s >= 0.05
        board.copied(step)
        with clock.measured() as waited:
            board.await_copy(step, 1e9, 1e9)
        assert waited.duration_s == 0


def test_a_copy_that_is_to_be_stored_is_waited_for_longer_but_not_time_and_again() -> None:
    """An agent that copies may be stopped: after a wait in vain, only its next answer is worth
    another wait.
    """
    clock = FakeClock()
    board = board_with(clock)

    def waited_s(step: int) -> float:
        with clock.measured() as waited:
            board.await_copy(step, 0.0, 0.2)
        return waited.duration_s

    board.copying(True)
    board.due(5)
    assert waited_s(4) < 0.1
    assert waited_s(6) >= 0.2, "the agent is late, and has not seen the one that is due"
    assert waited_s(10) < 0.1
    board.due(10)
    assert waited_s(10) >= 0.2


def test_each_board_is_one_workers_own() -> None:
    """The death of one worker breaks its own latch only."""
    first, second = Board.create(), Board.create()
    with worker_of(first) as first_worker, worker_of(second) as second_worker:
        first_worker.act(Board.sign_on)
        second_worker.act(Board.sign_on)
        watches = Watch(first), Watch(second)
        first_worker.kill()
        assert watches[0].ended.wait(LIMIT_S)
        watches[1].holds()
        second_worker.kill()
        assert watches[1].ended.wait(LIMIT_S)


def test_a_lease_is_seen_to_run_out_by_the_worker() -> None:
    """The worker sees the end even while its agent is stopped, since the board shows only the end
    of the lease.
    """
    board = Board.create()
    worker = Board(board.fd)
    assert not worker.lease_over, "the agent has not shown any yet"
    board.lease(time.monotonic_ns() + int(LIMIT_S * 1e9))
    assert not worker.lease_over
    board.lease(time.monotonic_ns() - 1)
    assert worker.lease_over
