"""Tests that tell a kernel that acknowledges from a process that reads, on real connections of real
processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator

import pytest
from support.nodes.network import HOST
from support.waiting import stays, wait_until

from chaoskit.coordinator.acknowledgement import Acknowledgements
from chaoskit.process import linux

NODE = "node0"
#: A delayed acknowledgement takes 40 ms: by then one that was to come would be here.
UNANSWERED_S = 0.15
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Provide a connection between a coordinator and an agent, after small messages in both
    directions.
    """
    with socket.create_server((HOST, 0)) as listener:
        agent_end = socket.create_connection(listener.getsockname())
        coordinator_end, _ = listener.accept()
    with coordinator_end, agent_end:
        for end in (coordinator_end, agent_end):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            agent_end.send(b"report")
            coordinator_end.recv(100)
            coordinator_end.send(b"heard")
            agent_end.recv(100)
        wait_until(lambda: unacknowledged_bytes(coordinator_end) == 0, "all is acknowledged")
        yield coordinator_end, agent_end


def unacknowledged_bytes(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def cut(end: socket.socket) -> None:
    """Have the kernel drop every segment for this end, before TCP sees it."""
    program = ctypes.create_string_buffer(
        struct.pack("=HBBI", 0x06, 0, 0, 0)
    )  # return 0: no byte of the segment is kept
    end.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program))
    )


def heal(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def probe(acknowledgements: Acknowledgements, end: socket.socket, data: bytes = b"probe") -> None:
    acknowledgements.ask(NODE, end)
    end.send(data)


def fill(end: socket.socket) -> None:
    """Send until neither kernel has room for more."""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while end.send(bytes(65536)):
            pass


def serve(listener: socket.socket) -> None:
    """Read from one connection for ever, as an agent does."""
    connection, _ = listener.accept()
    while connection.recv(65536):
        pass


def test_the_kernel_of_a_process_that_is_stopped_acknowledges() -> None:
    acknowledgements = Acknowledgements()
    with socket.create_server((HOST, 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener,))
        process.start()
        try:
            with socket.create_connection(listener.getsockname()) as connection:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
                wait_until(lambda: linux.state(process.pid or 0) == "T", "the process is stopped")
                for _ in range(5):
                    probe(acknowledgements, connection)
                    wait_until(lambda: acknowledgements.take() == [NODE], "an acknowledgement")
        finally:
            process.kill()
            process.join()


def test_a_kernel_that_nothing_reaches_does_not_acknowledge(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """No acknowledgement comes, however often it is asked for; once the kernel is reached again,
    the first segment is one.
    """
    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    cut(agent_end)
    for _ in range(3):
        probe(acknowledgements, coordinator_end)
        stays(lambda: acknowledgements.take() == [], "no answer", for_s=UNANSWERED_S)
    heal(agent_end)
    wait_until(
        lambda: acknowledgements.take() == [NODE], "what was lost is sent again, and acknowledged"
    )
    assert acknowledgements.take() == []


def test_what_was_acknowledged_before_is_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A segment is an answer only if it comes after the question."""
    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    probe(acknowledgements, coordinator_end)
    wait_until(lambda: acknowledgements.take() == [NODE], "an acknowledgement")
    cut(agent_end)
    probe(acknowledgements, coordinator_end)
    stays(lambda: acknowledgements.take() == [], "no answer", for_s=UNANSWERED_S)


def test_what_was_sent_before_and_is_lost_hides_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel reports the missing data long before it is sent again."""
    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    cut(agent_end)
    coordinator_end.send(b"lost")
    heal(agent_end)
    probe(acknowledgements, coordinator_end)
    wait_until(lambda: acknowledgements.take() == [NODE], "an answer")


def test_a_process_that_reads_nothing_for_long_has_a_kernel_that_says_so(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A full buffer takes no more data, but the kernel's report of that is an answer."""
    coordinator_end, _ = ends
    acknowledgements = Acknowledgements()
    fill(coordinator_end)
    acknowledgements.ask(NODE, coordinator_end)
    wait_until(lambda: acknowledgements.take() == [NODE], "an answer")
    acknowledgements.ask(NODE, coordinator_end)
    wait_until(lambda: acknowledgements.take() == [NODE], "an answer at any time")


def test_a_report_is_an_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    acknowledgements.ask(NODE, coordinator_end)
    assert acknowledgements.take() == []
    agent_end.send(b"report")
    wait_until(lambda: acknowledgements.take() == [NODE], "the report")


def test_a_connection_that_ended_gives_no_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    acknowledgements.ask(NODE, coordinator_end)
    coordinator_end.close()
    assert acknowledgements.take() == []
    acknowledgements.forget(NODE)
    acknowledgements.ask(NODE, coordinator_end)
    agent_end.close()
    assert acknowledgements.take() == []


def test_what_is_no_tcp_gives_no_answer() -> None:
    acknowledgements = Acknowledgements()
    coordinator_end, agent_end = socket.socketpair()
    with coordinator_end, agent_end:
        acknowledgements.ask(NODE, coordinator_end)
        agent_end.send(b"report")
        assert acknowledgements.take() == []


def test_a_kernel_that_does_not_count_segments_gives_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The structure of kernels before Linux 4.6 is shorter: all is as if nothing was
    acknowledged.
    """

    class Older:
        def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes:
            return coordinator_end.getsockopt(level, option, min(buffer_bytes, 104))

    coordinator_end, agent_end = ends
    acknowledgements = Acknowledgements()
    acknowledgements.ask(NODE, Older())
    agent_end.send(b"report")
    stays(lambda: acknowledgements.take() == [], "no answer", for_s=UNANSWERED_S)
