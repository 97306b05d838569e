"""The progress board and its life latch, between real processes."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from chaoskit import osprocess
from chaoskit.runtime.board import Board, Spent
from chaoskit.vocabulary import Phase

WAIT_S = 30.0
STILL_S = 0.2  # how long to make sure that something does not happen


class Child:
    """A forked process that does one thing after another, each when it is told to."""

    def __init__(self, board: Board, *acts: Callable[[Board], object]) -> None:
        order_r, self._order = os.pipe()
        self._reply, reply_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                mine = Board(board.fd)  # a mapping of its own, as in a worker
                for act in acts:
                    os.read(order_r, 1)
                    act(mine)
                    os.write(reply_w, b".")
                os.read(order_r, 1)
                code = 0
            except BaseException:  # noqa: BLE001  # the child of a test reports it and ends
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(order_r)
        os.close(reply_w)

    def act(self) -> None:
        """Have the child do the next thing; returns when it is done."""
        os.write(self._order, b".")
        assert os.read(self._reply, 1) == b"."

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether its parent could learn of its end already."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        os.close(self._order)
        os.close(self._reply)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def child(board: Board, *acts: Callable[[Board], object]) -> Iterator[Child]:
    """A child that is gone afterwards."""
    started = Child(board, *acts)
    try:
        yield started
    finally:
        started.kill()
        started.reap()


class Watch:
    """Waits for the latch in a thread, as an agent does."""

    def __init__(self, board: Board, on_death: Callable[[], object] = lambda: None) -> None:
        self._board, self._on_death = board, on_death
        self.seen: object = None
        self.ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._board.await_death()
        self.seen = self._on_death()
        self.ended.set()


def sign_on(board: Board) -> None:
    board.sign_on()


def test_a_fresh_board_shows_nothing() -> None:
    """Before a worker signs on there is no pid and no rank."""
    board = Board.create()
    assert (board.pid, board.tid, board.rank, board.generation, board.step, board.commits) == (0, 0, -1, 0, 0, 0)
    assert board.trained_in == 0
    assert board.phase is Phase.START
    assert board.loss == 0.0


def test_another_process_sees_phase_place_and_progress() -> None:
    """Everything that the worker's main thread writes can be read at once in the process that made the board."""
    board = Board.create()
    acts: list[Callable[[Board], object]] = [
        sign_on,
        lambda mine: mine.place(7, 3),
        lambda mine: mine.enter(Phase.BACKWARD),
        lambda mine: mine.progress(12, 0.1),
        lambda mine: mine.progress(13, -math.pi),
        lambda mine: mine.progress(20),
        lambda mine: mine.enter(Phase.DONE),
    ]
    with child(board, *acts) as worker:
        before_ns = time.monotonic_ns()
        worker.act()
        assert (board.pid, board.tid, board.phase) == (worker.pid, worker.pid, Phase.START)
        assert before_ns <= board.since_ns <= time.monotonic_ns()
        assert board.rank == -1
        worker.act()
        assert (board.generation, board.rank) == (7, 3)
        before_ns = time.monotonic_ns()
        assert board.since_ns < before_ns
        worker.act()
        assert board.phase == Phase.BACKWARD
        assert before_ns <= board.since_ns <= time.monotonic_ns()
        worker.act()
        assert (board.step, board.commits, board.loss, board.trained_in) == (12, 1, 0.1, 7)
        worker.act()
        assert (board.step, board.commits, board.loss) == (13, 2, -math.pi)
        worker.act()
        assert (board.step, board.commits, board.loss) == (20, 2, -math.pi), "adopted steps are not its own commits"
        worker.act()
        assert (board.phase, board.generation, board.rank, board.step) == (Phase.DONE, 7, 3, 20)


def test_where_the_time_went_is_seen_whole_or_not_at_all() -> None:
    """Six numbers that belong together, under a writer at full speed."""

    def write(mine: Board) -> None:
        number = 0
        while True:
            number += 1
            mine.spend([number] * len(Spent._fields))

    board = Board.create()
    assert board.spent is None, "nothing was measured yet"
    with child(board, sign_on, write) as worker:
        worker.act()
        os.write(worker._order, b".")
        deadline_s = time.monotonic() + WAIT_S
        seen: set[Spent] = set()
        while len(seen) < 1000 and time.monotonic() < deadline_s:
            seen |= {spent for spent in [board.spent] if spent is not None}
        assert len(seen) == 1000
        assert {len(set(spent)) for spent in seen} == {1}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.0, 5e-324, 1.7976931348623157e308])
def test_a_loss_keeps_its_bits(loss: float) -> None:
    """Any float passes unchanged, also those that stand for a broken run."""
    board = Board.create()
    with child(board, lambda mine: mine.progress(1, loss)) as worker:
        worker.act()
        assert struct.pack("d", board.loss) == struct.pack("d", loss)


def test_a_reader_never_sees_half_a_number() -> None:
    """Under a writer at full speed, every value read is one that was written."""
    ones, zeros = 0x0101010101010101, 0

    def write(mine: Board) -> None:
        while True:
            mine.progress(ones)
            mine.progress(zeros)

    board = Board.create()
    with child(board, sign_on, write) as worker:
        worker.act()
        os.write(worker._order, b".")
        deadline_s = time.monotonic() + WAIT_S
        seen: set[int] = set()
        reads = 0
        while (len(seen) < 2 or reads < 50_000) and time.monotonic() < deadline_s:
            seen.add(board.step)
            reads += 1
        assert seen == {ones, zeros}


def _hold_memory(mine: Board) -> None:
    held.append(bytearray(b"\x01") * (200 * 2**20))
    mine.sign_on()


held: list[bytearray] = []


def test_a_kill_breaks_the_latch_before_the_process_has_ended() -> None:
    """With 200 MB to free, the latch tells of the death when waitpid still knows nothing."""
    for _ in range(6):  # on a busy machine the waiting thread may be late
        board = Board.create()
        with child(board, _hold_memory) as worker:
            worker.act()
            watch = Watch(board, worker.has_ended)
            assert not watch.ended.wait(0.01)
            worker.kill()
            assert watch.ended.wait(WAIT_S)
            if watch.seen is False:
                return
    raise AssertionError("the latch never came before the end of the process")


def _exit_in_order(_: Board) -> None:
    os._exit(0)


def _end_by_signal(_: Board) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("end", [_exit_in_order, _end_by_signal])
def test_any_end_breaks_the_latch(end: Callable[[Board], object]) -> None:
    """A worker that ends by itself, in order or not, is noticed the same way."""
    board = Board.create()
    with child(board, sign_on, end) as worker:
        worker.act()
        watch = Watch(board)
        assert not watch.ended.wait(STILL_S), "the latch must hold while the worker lives"
        os.write(worker._order, b".")
        assert watch.ended.wait(WAIT_S)


def test_a_latch_that_broke_before_is_seen_at_once() -> None:
    """An agent that begins to watch when the worker is dead already does not wait for ever."""
    board = Board.create()
    with child(board, sign_on) as worker:
        worker.act()
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert Watch(board).ended.wait(WAIT_S)


def test_a_stopped_worker_is_not_dead() -> None:
    """SIGSTOP leaves the latch whole, SIGCONT goes on as before, and the death of a stopped worker is seen."""
    board = Board.create()
    with child(board, sign_on, lambda mine: mine.progress(1)) as worker:
        worker.act()
        watch = Watch(board)
        os.kill(worker.pid, signal.SIGSTOP)
        _, status = os.waitpid(worker.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert not watch.ended.wait(STILL_S)
        os.kill(worker.pid, signal.SIGCONT)
        worker.act()
        assert board.step == 1
        assert not watch.ended.is_set()
        os.kill(worker.pid, signal.SIGSTOP)
        worker.kill()
        assert watch.ended.wait(WAIT_S)


def test_only_the_thread_that_signed_on_counts() -> None:
    """Other threads and children of the worker come and go without breaking its latch."""

    def run_thread(_: Board) -> None:
        thread = threading.Thread(target=os.getpid)
        thread.start()
        thread.join()

    def run_process(_: Board) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    board = Board.create()
    with child(board, sign_on, run_thread, run_process) as worker:
        worker.act()
        watch = Watch(board)
        worker.act()
        worker.act()
        assert not watch.ended.wait(STILL_S)
        assert osprocess.state(worker.pid) == "S"
        worker.kill()
        assert watch.ended.wait(WAIT_S)


FRESH = """
import sys
from chaoskit.runtime.board import Board
from chaoskit.vocabulary import Phase
board = Board(int(sys.argv[1]))
board.sign_on()
board.enter(Phase.FORWARD)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_fresh_interpreter_can_use_the_board() -> None:
    """Started with exec instead of fork, a worker that got the descriptor shows its progress and its death, too."""
    board = Board.create()
    with subprocess.Popen(
        [sys.executable, "-c", FRESH, str(board.fd)], pass_fds=[board.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"
            assert (board.pid, board.phase) == (worker.pid, Phase.FORWARD)
            watch = Watch(board)
            assert not watch.ended.wait(STILL_S)
        finally:
            worker.kill()
        assert watch.ended.wait(WAIT_S)


def test_a_copy_of_the_initial_state_is_waited_for_like_any_other() -> None:
    """Of step 0, too, nothing is taken for copied before it is."""
    board = Board.create()
    board.copying(True)
    for step in range(2):
        begun_s = time.monotonic()
        board.await_copy(step, 0.05, 0.0)
        assert time.monotonic() - begun_s >= 0.05
        board.copied(step)
        board.await_copy(step, 1e9, 1e9)


def test_a_copy_that_is_to_be_stored_is_waited_for_longer_but_not_time_and_again() -> None:
    """Whoever copies may stand still: only its next answer is worth another wait."""

    def waited_s(step: int) -> float:
        begun_s = time.monotonic()
        board.await_copy(step, 0.0, 0.2)
        return time.monotonic() - begun_s

    board = Board.create()
    board.copying(True)
    board.due(5)
    assert waited_s(4) < 0.1
    assert waited_s(6) >= 0.2, "whoever copies is late, and has not seen the one that is due"
    assert waited_s(10) < 0.1
    board.due(10)
    assert waited_s(10) >= 0.2


def test_each_board_is_one_workers_own() -> None:
    """The death of one worker breaks its own latch only."""
    first, second = Board.create(), Board.create()
    with child(first, sign_on) as one, child(second, sign_on) as other:
        one.act()
        other.act()
        watches = Watch(first), Watch(second)
        one.kill()
        assert watches[0].ended.wait(WAIT_S)
        assert not watches[1].ended.wait(STILL_S)
        other.kill()
        assert watches[1].ended.wait(WAIT_S)


def test_a_lease_is_seen_to_run_out_by_the_worker() -> None:
    """Also while the agent cannot say so: it only ever shows until when."""
    board = Board.create()
    worker = Board(board.fd)
    assert not worker.lease_over, "the agent has not shown any yet"
    board.lease(time.monotonic_ns() + int(WAIT_S * 1e9))
    assert not worker.lease_over
    board.lease(time.monotonic_ns() - 1)
    assert worker.lease_over
