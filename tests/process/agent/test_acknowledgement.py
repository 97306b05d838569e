"""Whether a kernel acknowledges is told from whether a process reads, on real connections of real processes."""

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
    """A connection as it is between a coordinator and an agent: small messages went both ways."""
    with socket.create_server((HOST, 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        mine, _ = listener.accept()
    with mine, theirs:
        for one in (mine, theirs):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(20):
            theirs.send(b"report")
            mine.recv(100)
            mine.send(b"heard")
            theirs.recv(100)
        wait_until(lambda: unacknowledged_bytes(mine) == 0, "all is acknowledged")
        yield mine, theirs


def unacknowledged_bytes(end: socket.socket) -> int:
    return int.from_bytes(fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def cut(end: socket.socket) -> None:
    """Have the kernel drop every segment that comes for this end, before TCP sees it."""
    program = ctypes.create_string_buffer(
        struct.pack("=HBBI", 0x06, 0, 0, 0)
    )  # return 0: no byte of it is kept
    end.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program))
    )


def heal(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def probe(asked: Acknowledgements, end: socket.socket, data: bytes = b"probe") -> None:
    asked.ask(NODE, end)
    end.send(data)


def fill(end: socket.socket) -> None:
    """Send until neither kernel has room for more."""
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while end.send(bytes(65536)):
            pass


def serve(listener: socket.socket) -> None:
    """The life of an agent: read what comes."""
    connection, _ = listener.accept()
    while connection.recv(65536):
        pass


def test_the_kernel_of_a_process_that_is_stopped_acknowledges() -> None:
    asked = Acknowledgements()
    with socket.create_server((HOST, 0)) as listener:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener,))
        process.start()
        try:
            with socket.create_connection(listener.getsockname()) as mine:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
                wait_until(lambda: linux.state(process.pid or 0) == "T", "the process is stopped")
                for _ in range(5):
                    probe(asked, mine)
                    wait_until(lambda: asked.take() == [NODE], "an acknowledgement")
        finally:
            process.kill()
            process.join()


def test_a_kernel_that_nothing_reaches_does_not_acknowledge(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Nothing comes back, however often it is asked; when it is reached again, the first of it is an answer."""
    mine, theirs = ends
    asked = Acknowledgements()
    cut(theirs)
    for _ in range(3):
        probe(asked, mine)
        stays(lambda: asked.take() == [], "no answer", for_s=UNANSWERED_S)
    heal(theirs)
    wait_until(lambda: asked.take() == [NODE], "what was lost is sent again, and acknowledged")
    assert asked.take() == []


def test_what_was_acknowledged_before_is_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Only a segment that comes after the question is one."""
    mine, theirs = ends
    asked = Acknowledgements()
    probe(asked, mine)
    wait_until(lambda: asked.take() == [NODE], "an acknowledgement")
    cut(theirs)
    probe(asked, mine)
    stays(lambda: asked.take() == [], "no answer", for_s=UNANSWERED_S)


def test_what_was_sent_before_and_is_lost_hides_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel says that something is missing, long before that is sent again."""
    mine, theirs = ends
    asked = Acknowledgements()
    cut(theirs)
    mine.send(b"lost")
    heal(theirs)
    probe(asked, mine)
    wait_until(lambda: asked.take() == [NODE], "an answer")


def test_a_process_that_reads_nothing_for_long_has_a_kernel_that_says_so(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Its buffer is full: nothing more can be sent to it, and a kernel that says so lives."""
    mine, _ = ends
    asked = Acknowledgements()
    fill(mine)
    asked.ask(NODE, mine)
    wait_until(lambda: asked.take() == [NODE], "an answer")
    asked.ask(NODE, mine)
    wait_until(lambda: asked.take() == [NODE], "an answer at any time")


def test_a_report_is_an_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    asked = Acknowledgements()
    asked.ask(NODE, mine)
    assert asked.take() == []
    theirs.send(b"report")
    wait_until(lambda: asked.take() == [NODE], "the report")


def test_a_connection_that_ended_gives_no_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = ends
    asked = Acknowledgements()
    asked.ask(NODE, mine)
    mine.close()
    assert asked.take() == []
    asked.forget(NODE)
    asked.ask(NODE, mine)
    theirs.close()
    assert asked.take() == []


def test_what_is_no_tcp_gives_no_answer() -> None:
    asked = Acknowledgements()
    mine, theirs = socket.socketpair()
    with mine, theirs:
        asked.ask(NODE, mine)
        theirs.send(b"report")
        assert asked.take() == []


def test_a_kernel_that_does_not_count_segments_gives_no_answer(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Before Linux 4.6 the structure is shorter: all is as if nothing was acknowledged."""

    class Older:
        def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes:
            return mine.getsockopt(level, option, min(buffer_bytes, 104))

    mine, theirs = ends
    asked = Acknowledgements()
    asked.ask(NODE, Older())
    theirs.send(b"report")
    stays(lambda: asked.take() == [], "no answer", for_s=UNANSWERED_S)
