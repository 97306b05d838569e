"""The kernel of a container whose hand runs on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.hand.client import AS_USER, directory, no_namespaces, public_python
from support.hand.pipe_stream import stream_of
from support.hand.pipes import hand_on_processes
from support.hand.targets import pid_one, target
from support.waiting import LIMIT_S, stays, wait_until

from chaoskit.attach.hands.hand import Hand, HandRefused, HandUnable
from chaoskit.attach.hands.hand_kernel import HandKernel
from chaoskit.errors import NodeUnreachable
from chaoskit.process import linux
from chaoskit.process.linux import TcpTroubles, children, start_ticks
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import HOST, Process

needs_namespaces = pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR1)
#: Two ranks below a launcher, each with a child that inherits its rank.
LAUNCHER = """
for rank in 0 1; do RANK=$rank sh -c 'sleep 600 & wait' & done
wait
"""
#: Two children that end and are not reaped.
UNREAPED = "sh -c 'exit 3' & sh -c 'kill -9 $$' & exec sleep 600"


def kernel_of(hand: Hand, is_over: Callable[[], bool] = lambda: False) -> HandKernel:
    return HandKernel(lambda: hand, is_over)


@contextlib.contextmanager
def shell(script: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script, and kill it and its children when the context ends."""
    process = subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def kernel() -> Iterator[HandKernel]:
    with hand_on_processes() as (hand, _):
        yield kernel_of(hand)


def test_a_process_is_found_by_its_pid(kernel: HandKernel) -> None:
    with target() as running:
        process = kernel.find(running.pid)
        assert (process.ticks, process.name) == (
            start_ticks(running.pid),
            HOST.find(running.pid).name,
        )
        assert process == kernel.find(running.pid)
        assert not process.is_gone()
    assert process.is_gone()
    assert kernel.find(running.pid).ticks is None


def test_a_kill_ends_a_process(kernel: HandKernel) -> None:
    with target() as running:
        process = kernel.find(running.pid)
        process.signal(signal.SIGKILL)
        assert running.process.wait(20) == -signal.SIGKILL
        assert process.is_gone()


def test_a_stop_holds_all_threads_until_it_is_continued(kernel: HandKernel) -> None:
    with target(threads=3) as running:
        process = kernel.find(running.pid)
        assert not process.is_stopped()
        process.signal(signal.SIGSTOP)
        process.signal(signal.SIGSTOP)  # as of a signal, a second one changes nothing
        assert process.is_stopped()
        count = len(running.times_s())
        stays(lambda: len(running.times_s()) == count, "no tick", for_s=0.2)
        process.signal(signal.SIGCONT)
        assert not process.is_stopped()
        running.wait_for_tick()
        process.signal(signal.SIGCONT)
        process.signal(signal.SIGSTOP)
        assert process.is_stopped()


def test_a_stopped_process_is_killed(kernel: HandKernel) -> None:
    with target(threads=3) as running:
        process = kernel.find(running.pid)
        process.signal(signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        assert running.process.wait(20) == -signal.SIGKILL
        assert not process.is_stopped()
        with pytest.raises(ProcessLookupError):
            process.signal(signal.SIGCONT)


def test_a_stop_ends_with_its_hand_and_the_next_hand_can_stop_again() -> None:
    with target(threads=3) as running, hand_on_processes() as (first, first_process):
        hands = [first]
        kernel = HandKernel(lambda: hands[-1], lambda: False)
        process = kernel.find(running.pid)
        process.signal(signal.SIGSTOP)
        assert process.is_stopped()
        first_process.kill()
        running.wait_for_tick()
        with hand_on_processes() as (second, _):
            hands.append(second)
            process.signal(signal.SIGSTOP)
            assert process.is_stopped()
            process.signal(signal.SIGCONT)
            running.wait_for_tick()


def test_a_hand_that_was_killed_proves_nothing_until_the_container_is_over() -> None:
    is_over = False
    with target() as running, hand_on_processes() as (hand, hand_process):
        kernel = kernel_of(hand, lambda: is_over)
        process = kernel.find(running.pid)
        hand_process.kill()
        wait_until(lambda: not hand.is_open, "the end of the hand")
        questions: dict[str, Callable[[], object]] = {
            "find": lambda: kernel.find(running.pid).ticks,
            "tree": lambda: kernel.tree(process),
            "is_gone": process.is_gone,
            "is_stopped": process.is_stopped,
            "threads": process.threads,
            "launched_ranks": lambda: kernel.launched_ranks(process),
            "exit_status": lambda: kernel.exit_status(process),
            "tcp_troubles": lambda: kernel.tcp_troubles(process),
        }
        for question in questions.values():
            with pytest.raises(NodeUnreachable, match="ended"):
                question()
        for signum in SIGNALS:
            with pytest.raises(NodeUnreachable):
                process.signal(signum)
        is_over = True
        assert {name: question() for name, question in questions.items()} == {
            "find": None,
            "tree": [],
            "is_gone": True,
            "is_stopped": False,
            "threads": {},
            "launched_ranks": {},
            "exit_status": None,
            "tcp_troubles": TcpTroubles(),
        }
        is_over = False  # the proof is remembered
        for signum in SIGNALS:
            with pytest.raises(ProcessLookupError):
                process.signal(signum)
        running.wait_for_tick()


def test_the_end_of_the_container_counts_though_its_hand_still_answers(kernel: HandKernel) -> None:
    process = kernel.find(os.getpid())
    kernel.end()
    assert process.is_gone()


@needs_namespaces
def test_the_kill_of_pid_one_takes_the_hand_along() -> None:
    """The hand itself is below pid 1 here, and is no process of the job."""
    hand_command = f"cd {directory()}; {public_python()} -S -m hand --processes"
    script = f"sleep 600 & {hand_command}; sleep 600"
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*unshare, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    hand = Hand("the hand", stream_of(process))
    try:
        hand.ask("hello", limit_s=LIMIT_S)
        kernel = kernel_of(hand, lambda: not hand.is_open)
        root = kernel.find(1)
        assert [child.name for child in kernel.tree(root)] == ["sh", "sleep"]
        root.signal(signal.SIGKILL)
        wait_until(root.is_gone, "the end of pid 1")
        assert kernel.tree(root) == []
    finally:
        hand.close()
        process.kill()
        process.wait()


@needs_namespaces
def test_pid_one_gets_only_signals_that_it_handles() -> None:
    with (
        pid_one(*AS_USER) as (running, inside),
        hand_on_processes(prefix=(*inside, *AS_USER)) as (hand, _),
    ):
        process = kernel_of(hand).find(1)
        process.signal(signal.SIGUSR1)
        wait_until(lambda: running.times_s("signal"), "the signal")
        with pytest.raises(HandUnable, match="no handler for SIGTERM") as refused:
            process.signal(signal.SIGTERM)
        assert "tini" in refused.value.remedy
        process.signal(signal.SIGSTOP)
        assert process.is_stopped()
        process.signal(signal.SIGCONT)
        running.wait_for_tick()


def test_a_signal_reaches_a_process(kernel: HandKernel) -> None:
    with target() as running:
        process = kernel.find(running.pid)
        process.signal(signal.SIGUSR1)
        wait_until(lambda: running.times_s("signal"), "the signal")
        process.signal(signal.SIGTERM)
        assert running.process.wait(20) == -signal.SIGTERM


def test_a_stop_that_would_outlive_the_hand_is_refused(kernel: HandKernel) -> None:
    with target() as running:
        process = kernel.find(running.pid)
        for signum in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            with pytest.raises(HandRefused, match="operation stop"):
                process.signal(signum)
        running.wait_for_tick()


@needs_namespaces
def test_a_refusal_of_the_kernel_passes_through() -> None:
    with target() as running, hand_on_processes(prefix=AS_USER) as (hand, _):
        process = kernel_of(hand).find(running.pid)
        for signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1):
            with pytest.raises(HandUnable, match="runAsUser: 0"):
                process.signal(signum)
        running.wait_for_tick()


def test_another_process_with_the_pid_is_left_alone(kernel: HandKernel) -> None:
    with target() as running:
        process = kernel.find(running.pid)
        assert process.ticks is not None
        former = Process(running.pid, process.ticks + 1, "former", kernel)
        for absent in (former, Process(running.pid, None, "absent", kernel)):
            for signum in SIGNALS:
                with pytest.raises(ProcessLookupError):
                    absent.signal(signum)
            assert absent.is_gone()
            assert not absent.is_stopped()
            assert absent.threads() == {}
            assert kernel.tree(absent) == []
            assert kernel.tcp_troubles(absent) == TcpTroubles()
        running.wait_for_tick()
        assert not running.times_s("signal")


def test_ranks_are_those_of_the_processes_that_train(kernel: HandKernel) -> None:
    with shell(LAUNCHER, RANK="0") as process:
        root = kernel.find(process.pid)
        wait_until(
            lambda: len(kernel.tree(root)) == 5, "the launcher, two ranks, and their children"
        )
        pids = [pid for pid in children(process.pid) if linux.process_name(pid) == "sh"]
        first, second = sorted(pids, key=lambda pid: linux.variables(pid)["RANK"])
        assert kernel.launched_ranks(root) == {
            kernel.find(first): LaunchedRank(0, "RANK"),
            kernel.find(second): LaunchedRank(1, "RANK"),
        }
        os.kill(second, signal.SIGKILL)
        wait_until(kernel.find(second).is_gone, "the end of a rank")
        assert kernel.find(second) not in kernel.launched_ranks(root)
        assert {child.pid for child in kernel.tree(root)} == {
            child.pid for child in HOST.tree(HOST.find(process.pid))
        }


def test_the_first_process_of_a_container_may_have_the_rank(kernel: HandKernel) -> None:
    with shell("sleep 600 & wait", RANK="3") as process:
        root = kernel.find(process.pid)
        wait_until(lambda: len(kernel.tree(root)) == 2, "the child, which inherits the rank")
        assert kernel.launched_ranks(root) == {root: LaunchedRank(3, "RANK")}


def test_the_wait_status_of_a_zombie_is_read_and_it_is_not_in_the_tree(kernel: HandKernel) -> None:
    with shell(UNREAPED) as process:
        root = kernel.find(process.pid)
        assert kernel.exit_status(root) is None
        zombies = wait_until(lambda: zombies_of(process.pid, 2), "two zombies")
        statuses = sorted(kernel.exit_status(kernel.find(pid)) or 0 for pid in zombies)
        assert statuses == [signal.SIGKILL, 3 << 8]
        assert kernel.tree(root) == [root]
        assert kernel.find(zombies[0]).is_gone()
        other = Process(zombies[0], 1, "other", kernel)
        assert kernel.exit_status(other) is None


@needs_namespaces
def test_a_wait_status_that_the_hand_may_not_read_is_unknown() -> None:
    """The kernel shows 0 for it."""
    with shell(UNREAPED) as process, hand_on_processes(prefix=AS_USER) as (hand, _):
        kernel = kernel_of(hand)
        for pid in wait_until(lambda: zombies_of(process.pid, 2), "two zombies"):
            assert kernel.exit_status(kernel.find(pid)) is None
            assert kernel.find(pid).ticks is not None


def zombies_of(pid: int, count: int) -> list[int]:
    """Return the children of a process once so many of them are zombies, else an empty list."""
    zombies = [child for child in children(pid) if linux.state(child) == "Z"]
    return zombies if len(zombies) == count else []


def test_threads_are_those_that_the_kernel_of_the_machine_shows(kernel: HandKernel) -> None:
    with target(threads=3) as running:
        process = kernel.find(running.pid)
        process.signal(signal.SIGSTOP)  # so that all counters stand still
        threads = process.threads()
        assert threads == HOST.find(running.pid).threads()
        assert len(threads) == 3
        assert {thread.state for thread in threads.values()} == {"t"}
        process.signal(signal.SIGCONT)
        running.wait_for_tick()
        assert process.threads()[running.pid].switches > threads[running.pid].switches


def test_tcp_counters_are_those_that_this_machine_shows(kernel: HandKernel) -> None:
    me = kernel.find(os.getpid())
    before = kernel.tcp_troubles(me)
    with socket.socket() as listener:  # bound, but refuses connections
        listener.bind(("127.0.0.1", 0))
        for _ in range(10):
            with socket.socket() as client, pytest.raises(ConnectionRefusedError):
                client.connect(listener.getsockname())
    assert kernel.tcp_troubles(me).resets >= before.resets + 10
    wait_until(
        lambda: kernel.tcp_troubles(me) == linux.tcp_troubles(me.pid, me.ticks), "equal counters"
    )


def test_requests_of_many_threads_at_once(kernel: HandKernel) -> None:
    """A process that several callers stop at once has one stop."""
    with target(threads=3) as running, ThreadPoolExecutor(8) as pool:
        process = kernel.find(running.pid)
        questions = [process.is_gone, lambda: len(process.threads()), lambda: kernel.tree(process)]
        answers = list(pool.map(lambda number: questions[number % 3](), range(60)))
        assert answers == [False, 3, [process]] * 20
        list(pool.map(lambda _: process.signal(signal.SIGSTOP), range(8)))
        assert process.is_stopped()
        process.signal(signal.SIGCONT)
        running.wait_for_tick()
