"""Tests of the supervisor over a Unix socket and over TCP: what it starts, ends, reports and
does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.nodes.supervisors import ENVIRONMENT, Started, dialing, on_tcp, on_unix
from support.waiting import wait_until

from chaoskit.config import DETECTION, RunConfig
from chaoskit.errors import HarnessError
from chaoskit.job import resolve_job
from chaoskit.process import linux
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.substrate.core.actions import Backend, BreakDisk, CapCpu
from chaoskit.substrate.core.processes import HOST, Process
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import (
    ApplyAction,
    AskKernel,
    AskWhyNot,
    LiftAction,
    LineData,
    OpenListener,
    Program,
    RequestDone,
    RequestFailed,
    SendSignal,
    StartProgram,
    SupervisorReady,
)
from chaoskit.substrate.supervisor.remote_node import BackendAway, KernelAway, why_not
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven

TESTS = Path(__file__).parents[2]


@pytest.fixture(params=[on_unix, on_tcp])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Started]:
    made: Callable[[Path], Started] = request.param
    started = made(tmp_path)
    yield started
    started.close()


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Started]:
    started = on_tcp(tmp_path)
    yield started
    started.close()


def test_how_a_program_ended_is_told(supervisor: Started, tmp_path: Path) -> None:
    """The supervisor reports the end unasked, and the program's output is in its log."""
    assert os.waitstatus_to_exitcode(supervisor.exit_of(supervisor.start("leave", 7))) == 7
    killed = supervisor.start("complain", "it is over")
    assert os.waitstatus_to_exitcode(supervisor.exit_of(killed)) == -signal.SIGKILL
    assert (tmp_path / "log" / "node0.complain.log").read_text() == "it is over"


@pytest.mark.parametrize("how", ["runs", "has ended"])
def test_a_program_is_ended_with_what_it_left_behind(
    supervisor: Started, tmp_path: Path, how: str
) -> None:
    """Orphans of the program are ended, too, even if the program itself has ended; other programs
    are not disturbed.
    """
    other, program = supervisor.start("stay"), supervisor.start("orphan", tmp_path / "pid")
    wait_until((tmp_path / "pid").exists, "the start of the orphan")
    orphan = HOST.find(int((tmp_path / "pid").read_text()))
    if how == "has ended":
        program.signal(signal.SIGKILL)
        supervisor.exit_of(program)
        assert not orphan.is_gone()
    supervisor.end(program)
    assert program.is_gone()
    assert orphan.is_gone()
    assert not other.is_gone()


def test_a_program_may_end_by_itself(supervisor: Started) -> None:
    """The supervisor waits only as long as some process of the program runs."""
    leaves = supervisor.start("leave", 3)
    supervisor.end(leaves, patience_s=60.0)
    assert os.waitstatus_to_exitcode(supervisor.exit_of(leaves)) == 3


def test_everything_ends_with_the_runner(supervisor: Started) -> None:
    """The stream ends in every case."""
    left = supervisor.start("stay")
    supervisor.link.close()
    assert supervisor.process.wait(30) == 0
    wait_until(lambda: HOST.find(left.pid).is_gone(), "the end of the program")


def test_everything_ends_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    """The kernel closes the sockets of a killed runner."""
    script = """
import os, signal, sys
from pathlib import Path
from process.supervisor.test_supervisor import on_tcp
supervisor = on_tcp(Path(sys.argv[1]))
print(supervisor.process.pid, supervisor.start("stay").pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    runner = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert runner.returncode == -signal.SIGKILL, runner.stderr
    for pid in map(int, runner.stdout.split()):
        wait_until(lambda pid=pid: linux.is_ending(pid), f"the end of {pid}")  # type: ignore[misc]


def test_a_program_that_is_not_over_is_started_again_on_its_socket(supervisor: Started) -> None:
    """Connections that come meanwhile wait. The port is closed once the program is over."""
    listener = supervisor.link.listen("127.0.0.1", 0)
    program = supervisor.program("answer", 5, restarts=2, over=0)
    first = supervisor.link.start(program, [listener])
    pids = [answer_of(listener.address) for _ in range(3)]
    assert pids[0] == str(first.pid).encode()
    assert len(set(pids)) == 3
    wait_until(lambda: not answers(listener.address), "the end of the port")


def test_a_program_that_is_over_is_not_started_again(supervisor: Started) -> None:
    listener = supervisor.link.listen("127.0.0.1", 0)
    supervisor.link.start(supervisor.program("answer", 0, restarts=2, over=0), [listener])
    answer_of(listener.address)
    assert not answers(listener.address), (
        "it has one answer, and the next one would be another process's"
    )


def test_a_program_that_is_ended_is_not_started_again(supervisor: Started) -> None:
    """The first pid also names the process that has replaced the program, which is ended."""
    listener = supervisor.link.listen("127.0.0.1", 0)
    first = supervisor.link.start(supervisor.program("answer", 5, restarts=9, over=0), [listener])
    answer_of(listener.address)
    supervisor.end(first)
    assert not answers(listener.address)


def answer_of(address: tuple[str, int]) -> bytes:
    with socket.create_connection(address) as connection:
        return connection.recv(100)


def answers(address: tuple[str, int]) -> bool:
    """Return whether a process serves the port; a connection in the kernel's queue gets nothing
    when the port closes.
    """
    try:
        return bool(answer_of(address))
    except OSError:
        return False


def test_sockets_of_the_runner_go_along(tmp_path: Path) -> None:
    """The runner on the same host makes a socket in a network of the run, and passes it on."""
    supervisor = on_unix(tmp_path)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            process = supervisor.link.start(supervisor.program("answer", 0), [listener])
        assert answer_of(address) == str(process.pid).encode()
    finally:
        supervisor.close()


def test_a_request_that_cannot_be_met_is_refused_with_its_reason(supervisor: Started) -> None:
    """A request after it succeeds."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(HarnessError, match="Address already in use"),
    ):
        supervisor.link.listen("127.0.0.1", taken.getsockname()[1])
    assert os.waitstatus_to_exitcode(supervisor.exit_of(supervisor.start("leave", 7))) == 7


@pytest.mark.parametrize(
    "request_of",
    [
        lambda number: OpenListener(number, "127.0.0.1", 70_000),
        lambda number: StartProgram(number, Program("a:b", b"", "a", "/"), kept=(99,)),
        lambda number: AskKernel(number, "nothing", 1),
        lambda number: SendSignal(number, 2**40, None, 9),
        lambda number: LiftAction(number, 99),
        lambda number: AskWhyNot(number, "no.module:Nothing"),
        lambda number: ApplyAction(
            number, "node0", (1, None), "/", "chaoskit.substrate.core.actions:CapCpu", b"{"
        ),
    ],
)
def test_a_bad_request_ends_nothing(supervisor: Started, request_of: Callable[[int], Any]) -> None:
    """The request is refused, and running programs continue."""
    process = supervisor.start("stay")
    with pytest.raises((HarnessError, ProcessLookupError)):
        supervisor.link.request(request_of, answer_type=None)
    assert not process.is_gone()


def test_a_socket_that_no_program_has_can_be_closed(supervisor: Started) -> None:
    """Otherwise the port would be in use as long as the supervisor lives."""
    listener = supervisor.link.listen("127.0.0.1", 0)
    listener.close()
    assert not answers(listener.address)
    listener.close()


def test_what_programs_left_behind_together_is_ended(supervisor: Started, tmp_path: Path) -> None:
    """If two programs end at the same moment, it is unknown which one an orphan belongs to: the
    first end takes it. A program may also die between a reap and the look for its orphans, so
    there are several rounds.
    """
    for number in range(10):
        files = [tmp_path / f"{name}{number}" for name in "ab"]
        programs = [supervisor.start("orphan", file) for file in files]
        wait_until(lambda files=files: all(file.exists() for file in files), "both orphans")
        orphans = [HOST.find(int(file.read_text())) for file in files]
        for program in programs:
            os.kill(program.pid, signal.SIGKILL)
        for program in programs:
            supervisor.end(program)
        assert all(orphan.is_gone() for orphan in orphans)


def test_the_kernel_watches_the_way_to_the_other_machine(far: Started) -> None:
    """Programs would run for ever after the runner's machine lost its power if there were no
    keepalive.
    """
    for pid in (far.process.pid, os.getpid()):
        wait_until(lambda pid=pid: is_watched(pid, far.process.pid), f"the kernel's timer at {pid}")  # type: ignore[misc]


def is_watched(pid: int, supervisor: int) -> bool:
    """Return whether the kernel probes the end of the stream that a process has."""
    shown = subprocess.run(
        ["ss", "-tnopH"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (port,) = {line.split()[4] for line in shown if f"pid={supervisor}," in line}
    ends = [line for line in shown if port in line and f"pid={pid}," in line]
    return bool(ends) and all("timer:(keepalive," in line for line in ends)


def test_a_program_that_cannot_be_imported_ends(supervisor: Started, tmp_path: Path) -> None:
    """The log of the program has the error."""
    program = Program("support.nodes.programs:nothing", b"", "nothing", str(tmp_path))
    assert os.waitstatus_to_exitcode(supervisor.exit_of(supervisor.link.start(program))) == 1
    assert "AttributeError" in (tmp_path / "log" / "nothing.log").read_text()


def test_a_runner_without_the_token_is_not_served(tmp_path: Path) -> None:
    """The runner refuses a supervisor without the token, too: the proof is mutual."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coming = proven(listener, "another token")
        process = dialing(listener.getsockname(), "a token")
        came: list[socket.socket] = []
        waiting = threading.Thread(target=lambda: came.extend(coming), daemon=True)
        waiting.start()
        assert process.wait(60) == 1
        listener.shutdown(socket.SHUT_RDWR)
        waiting.join(60)
        assert came == []


def test_a_supervisor_of_another_version_is_refused() -> None:
    """Messages of two versions may differ; the error names both versions."""
    runner_end, supervisor_end = socket.socketpair()
    with supervisor_end:
        frames.send(supervisor_end, SupervisorReady("0.0.1"))
        with pytest.raises(HarnessError, match=r"has chaoskit 0\.0\.1, and this process has"):
            SupervisorLink(runner_end, "the supervisor").await_ready()
        runner_end.close()


class OneNode(SupervisedSubstrate):
    """A substrate with one supervisor."""

    def __init__(self, link: SupervisorLink) -> None:
        super().__init__()
        self._link = link

    def link(self, station: str) -> SupervisorLink:
        return self._link


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_end_that_fails_is_told_and_one_that_came_with_the_supervisor_is_not(
    is_gone: bool,
) -> None:
    """A process that a supervisor failed to end would live on unnoticed; those of a dead supervisor
    end with its stream.
    """
    runner_end, supervisor_end = socket.socketpair()
    substrate = OneNode(SupervisorLink(runner_end, "the supervisor"))
    if not is_gone:
        frames.send(supervisor_end, RequestFailed(1, "process 7 does not end"))
    failure = (
        nullcontext() if is_gone else pytest.raises(HarnessError, match="process 7 does not end")
    )
    with supervisor_end, runner_end:
        if is_gone:
            supervisor_end.close()
        with failure:
            substrate.end([("node0", Process(7, 1, "the agent"))], 0.0)
    substrate.close()


def test_a_supervisor_that_goes_away_is_an_error() -> None:
    """The stream may end in the middle of an answer, too."""
    runner_end, supervisor_end = socket.socketpair()
    link = SupervisorLink(runner_end, "the supervisor of node1")
    supervisor_end.sendall(frames.encode(RequestDone(1))[:3])
    supervisor_end.close()
    with pytest.raises(HarnessError, match="the supervisor of node1 is gone"):
        link.listen("127.0.0.1", 0)
    assert not link.is_open()


def test_requests_and_answers_pass_the_wire() -> None:
    """Unknown messages are refused."""
    for message in (
        OpenListener(1, "127.0.0.1", 0),
        StartProgram(2, Program("a:b", b"\0", "a", "/")),
    ):
        assert frames.decoder(type(message))(frames.encode(message)[4:]) == message


# -- a node that only the stream reaches -----------------------------------------------------------


def test_processes_are_seen_and_signalled_through_the_stream(far: Started) -> None:
    """The operations are those of a runner on the same machine."""
    process = far.start("stay")
    assert [process_seen.pid for process_seen in process.kernel.tree(process)] == [process.pid]
    assert process.kernel.find(process.pid) == process
    assert process.threads()[process.pid].state in "RSD"
    process.signal(signal.SIGSTOP)
    wait_until(process.is_stopped, "the stop")
    assert not process.is_gone()
    process.signal(signal.SIGKILL)
    wait_until(process.is_gone, "the end")
    assert process.kernel.tree(process) == []
    with pytest.raises(ProcessLookupError, match="gone"):
        process.signal(signal.SIGKILL)


def test_a_pid_that_is_another_process_by_now_is_not_signalled(far: Started) -> None:
    process = far.start("stay")
    before = Process(process.pid, (process.ticks or 0) - 1, "before", process.kernel)
    assert before.is_gone()
    with pytest.raises(ProcessLookupError, match="gone"):
        before.signal(signal.SIGKILL)
    assert not process.is_gone()


def test_a_sign_of_life_that_has_come_counts_when_the_time_is_over(far: Started) -> None:
    """Several supervisors are asked at once, and their answers are read one after the other."""
    before = far.link.ask_alive()
    wait_until(lambda: far.link.await_sign(before, -1.0), "the sign of life")
    assert not far.link.await_sign(before + 1, 0.0)


def test_a_supervisor_that_is_doubted_is_asked_nothing(far: Started) -> None:
    """The silence of a supervisor proves nothing about its processes, and no call waits for its
    answer.
    """
    process = far.start("outlive")
    assert isinstance(process.kernel, KernelAway)
    process.kernel.is_doubted = True
    os.kill(far.process.pid, signal.SIGSTOP)
    with pytest.raises(HarnessError, match="may be gone"):
        process.is_gone()
    with pytest.raises(HarnessError, match="may be gone"):
        process.signal(signal.SIGKILL)
    os.kill(far.process.pid, signal.SIGCONT)
    process.kernel.is_doubted = False
    assert not process.is_gone()


def test_a_supervisor_that_is_gone_is_no_word_of_its_processes(far: Started) -> None:
    """A broken stream must confirm no fault, since the processes live on here.

    They count as gone once the keeper of the node reports so.
    """
    process = far.start("outlive")
    far.process.kill()
    far.process.wait()
    for look in (
        process.is_gone,
        process.is_stopped,
        process.threads,
        lambda: process.kernel.tree(process),
    ):
        with pytest.raises(HarnessError, match="the supervisor is gone"):
            look()
    with pytest.raises(HarnessError, match="the supervisor is gone"):
        process.signal(signal.SIGKILL)
    os.kill(process.pid, 0)
    os.kill(process.pid, signal.SIGKILL)
    assert isinstance(process.kernel, KernelAway)
    process.kernel.end()
    assert process.is_gone()
    assert process.kernel.tree(process) == []
    with pytest.raises(ProcessLookupError, match="gone with its node"):
        process.signal(signal.SIGKILL)


@pytest.mark.skipif(
    bool(capabilities.why_not(CapCpu)), reason=f"cgroups: {capabilities.why_not(CapCpu)}"
)
def test_an_action_is_done_counted_and_lifted_through_the_stream(
    far: Started, tmp_path: Path
) -> None:
    """The kernel's count arrives by itself, and no control group is left."""
    assert why_not(far.link, CapCpu) == ""
    assert why_not(far.link, BreakDisk) == "no supervisor supports BreakDisk"
    process = far.start("burn")
    backend = BackendAway(
        frozenset({CapCpu}), lambda node: far.link, lambda node: process, tmp_path
    )
    groups = groups_of(process.pid)
    limit = backend.apply("node0", CapCpu(cores=0.1))
    assert groups_of(process.pid) != groups
    wait_until(lambda: limit.shown() > 3, "periods in which it was held back")
    assert limit.lift()
    assert limit.lift()
    assert groups_of(process.pid) == groups
    assert limit.shown() > 3, "what was counted stays known"


@pytest.mark.skipif(
    bool(capabilities.why_not(CapCpu)), reason=f"cgroups: {capabilities.why_not(CapCpu)}"
)
def test_the_end_of_another_program_lifts_nothing(far: Started, tmp_path: Path) -> None:
    """The limit is lifted with the program that the node runs below; its count is known then,
    too.
    """
    process, other = far.start("burn"), far.start("stay")
    backend = BackendAway(
        frozenset({CapCpu}), lambda node: far.link, lambda node: process, tmp_path
    )
    groups = groups_of(process.pid)
    limit = backend.apply("node0", CapCpu(cores=0.1))
    far.end(other)
    assert groups_of(process.pid) != groups
    wait_until(lambda: limit.shown() > 3, "periods in which it was held back")
    backend.release("node1")
    assert groups_of(process.pid) != groups
    backend.release("node0")
    assert groups_of(process.pid) == groups
    assert limit.lift()
    assert limit.shown() > 3


@pytest.mark.skipif(
    bool(capabilities.why_not(CapCpu)), reason=f"cgroups: {capabilities.why_not(CapCpu)}"
)
@pytest.mark.parametrize("how", ["killed", "left"])
def test_an_action_in_force_is_put_back_without_the_runner(
    far: Started, tmp_path: Path, how: str
) -> None:
    """The supervisor undoes it when its runner is gone; the supervisor's guard does when the
    supervisor is killed.
    """
    process = far.start("burn")
    backend = BackendAway(
        frozenset({CapCpu}), lambda node: far.link, lambda node: process, tmp_path
    )
    backend.apply("node0", CapCpu(cores=0.1))
    made = set(groups_of(process.pid)) - set(groups_of(os.getpid()))
    paths = [
        path
        for line in made
        for path in Path("/sys/fs/cgroup").glob(f"**/{line.rpartition('/')[2]}")
    ]
    assert paths
    if how == "killed":
        far.process.kill()
    far.link.close()
    wait_until(lambda: not any(path.exists() for path in paths), "the end of its group")


def groups_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()


def test_lines_through_the_door_reach_the_runner(far: Started, tmp_path: Path) -> None:
    """Messages stay whole in both directions; each end notices when the other one hangs up."""
    local, remote = tmp_path / "here", tmp_path / "there"

    async def receive_all() -> list[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with linux.socket_name(local) as name:
                listener.bind(name)
            listener.listen()
            listener.setblocking(False)
            far.link.open_door(local, remote)
            first, second = far.start("talk", remote), far.start("talk", remote)
            loop, received = asyncio.get_running_loop(), list[bytes]()
            with far.link.heard():
                lines = [(await loop.sock_accept(listener))[0] for _ in range(2)]
                for line in lines:
                    received += [await loop.sock_recv(line, 100)]
                    await loop.sock_sendall(line, b"ab")
                    await loop.sock_sendall(line, b"cd")
                    received += [await loop.sock_recv(line, 100) for _ in range(2)]
                lines[0].close()
                while not far.link.exits:  # noqa: ASYNC110 - no event reports it
                    await asyncio.sleep(0.005)
                (survivor,) = {first.pid, second.pid}.difference(far.link.exits)
                os.kill(survivor, signal.SIGKILL)
                received += [await loop.sock_recv(lines[1], 100)]
                lines[1].close()
            return received

    assert asyncio.run(asyncio.wait_for(receive_all(), 60)) == [
        b"hello",
        b"AB",
        b"CD",
        b"hello",
        b"AB",
        b"CD",
        b"",
    ]


def test_a_process_that_reads_nothing_holds_up_no_other_one(far: Started, tmp_path: Path) -> None:
    """The process is hung up on. SIGCONT for it takes the same stream."""
    local, remote = tmp_path / "here", tmp_path / "there"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with linux.socket_name(local) as name:
            listener.bind(name)
        listener.listen()
        far.link.open_door(local, remote)
        process = far.start("talk", remote)
        listener.settimeout(60)
        wait_until(
            lambda: far.link.is_open() and linux.await_readable([listener.fileno()], 0.0),
            "its line",
        )
        process.signal(signal.SIGSTOP)
        wait_until(process.is_stopped, "its stop")
        for _ in range(2000):
            far.link.notify(LineData(1, b"x" * 100))
        process.signal(signal.SIGCONT)
        assert os.waitstatus_to_exitcode(far.exit_of(process)) == 0


def test_lines_end_with_their_door(far: Started, tmp_path: Path) -> None:
    """Lines of another run have other numbers."""
    listeners = []
    for name in ("first", "second"):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with linux.socket_name(tmp_path / name) as path:
            listener.bind(path)
        listener.listen()
        listeners.append(listener)
    far.link.open_door(tmp_path / "first", tmp_path / "there")
    before = far.start("talk", tmp_path / "there")
    wait_until(
        lambda: far.link.is_open() and linux.await_readable([listeners[0].fileno()], 0.0),
        "the first line",
    )
    old, _ = listeners[0].accept()
    wait_until(
        lambda: far.link.is_open() and linux.await_readable([old.fileno()], 0.0),
        "what is said on it",
    )
    far.link.open_door(tmp_path / "second", tmp_path / "there")
    assert os.waitstatus_to_exitcode(far.exit_of(before)) == 0
    assert [old.recv(100), old.recv(100)] == [b"hello", b""]
    far.start("talk", tmp_path / "there")
    wait_until(
        lambda: far.link.is_open() and linux.await_readable([listeners[1].fileno()], 0.0),
        "the second line",
    )
    for end in (old, *listeners):
        end.close()


class Unequipped(LocalSubstrate):
    """A substrate with a backend that cannot be made."""

    started: tuple[str, ...] = ()

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        self.started = cluster.nodes
        raise HarnessError("the backend cannot be loaded")


def test_a_launch_that_fails_ends_what_it_has_started(tmp_path: Path) -> None:
    """The launch leaves only its error; the next launch finds a supervisor without programs."""
    before = set(linux.children(os.getpid()))
    job = resolve_job(
        f"{TESTS / 'jobs' / 'failing' / 'troubled.py'}:plain", {"step_s": 0.01, "steps": 10}
    )
    substrate = Unequipped()
    try:
        with pytest.raises(HarnessError, match="cannot be loaded"):
            substrate.launch(
                RunConfig(job=job, nodes=2, spares=0, **DETECTION["relaxed"]), tmp_path
            )
        own_children = set(linux.children(os.getpid())) - before
        (supervisor,) = [pid for pid in own_children if linux.process_name(pid) == "ck-supervisor"]
        assert [pid for pid in linux.descendants(supervisor) if not linux.is_ending(pid)] == []
        assert substrate.started == ("node0", "node1")
    finally:
        substrate.close()


# -- signs of life ---------------------------------------------------------------------------------


def test_a_supervisor_that_stands_still_gives_no_sign_of_life(far: Started) -> None:
    """The kernel answers for a stopped supervisor; only the supervisor itself can show that it
    serves.
    """
    process = far.process
    assert asyncio.run(far.link.answers(10.0))
    process.send_signal(signal.SIGSTOP)
    try:
        assert not asyncio.run(far.link.answers(0.3))
        assert far.link.is_open()
    finally:
        process.send_signal(signal.SIGCONT)
    assert asyncio.run(far.link.answers(10.0))


def test_a_file_is_written_there_without_an_answer(far: Started, tmp_path: Path) -> None:
    far.link.write_unanswered(tmp_path / "written", b"data")
    assert asyncio.run(far.link.answers(10.0))  # requests are served in order
    assert (tmp_path / "written").read_bytes() == b"data"
