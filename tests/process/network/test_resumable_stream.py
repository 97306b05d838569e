"""Tests of a stream that outlives its connections: no byte is lost, doubled or reordered."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.nodes.supervisors import COMMAND, ENVIRONMENT, Started
from support.waiting import wait_until

from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.remote_node import KernelAway
from chaoskit.substrate.supervisor.resumable_stream import (
    Resumable,
    StreamCarrier,
    run_connecting_side,
)
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.wire import frames

PATIENCE_S = 10.0
CUTS = 60

# -- without I/O -----------------------------------------------------------------------------------


class Way:
    """Two sides of a stream, and the bytes in transit between them."""

    def __init__(self) -> None:
        self.sides = Resumable(), Resumable()
        self.sent, self.came = [bytearray(), bytearray()], [bytearray(), bytearray()]
        self.cut()

    def cut(self) -> None:
        """Lose the bytes in transit, and make another connection."""
        self.on_its_way = [
            bytearray(side.begin()) for side in self.sides
        ]  # by the side that has sent it

    def send(self, side: int, data: bytes) -> None:
        self.sent[side] += data
        self.on_its_way[side] += self.sides[side].send(data)

    def deliver(self, side: int, count: int) -> None:
        """Deliver ``count`` bytes that ``side`` has sent."""
        data = bytes(self.on_its_way[side][:count])
        del self.on_its_way[side][:count]
        new, answer = self.sides[1 - side].receive(data)
        self.came[side] += new
        self.on_its_way[1 - side] += answer

    def deliver_all(self) -> None:
        while any(self.on_its_way):
            for side in (0, 1):
                self.deliver(side, len(self.on_its_way[side]))


_side = st.integers(0, 1)
_steps = st.one_of(
    st.tuples(st.just("send"), _side, st.integers(1, 40_000)),
    st.tuples(st.just("deliver"), _side, st.integers(0, 50_000)),
    st.tuples(st.just("cut"), _side, st.just(0)),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_steps, max_size=60))
def test_everything_comes_once_and_in_order(steps: list[tuple[str, int, int]]) -> None:
    way = Way()
    for number, (what, side, size) in enumerate(steps):
        if what == "send":
            way.send(side, bytes([number % 256]) * size)
        elif what == "deliver":
            way.deliver(side, size)
        else:
            way.cut()
        assert all(way.sent[end].startswith(way.came[end]) for end in (0, 1))
    way.cut()
    way.deliver_all()
    assert way.came == way.sent


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_steps, max_size=20))
def test_an_end_comes_behind_everything(steps: list[tuple[str, int, int]]) -> None:
    way = Way()
    for what, _, size in steps:
        if what == "send":
            way.send(0, b"x" * size)
    way.on_its_way[0] += way.sides[0].end()
    way.cut()
    assert not way.sides[1].is_over
    way.deliver_all()
    assert way.sides[1].is_over
    assert way.came[0] == way.sent[0]


def test_what_was_taken_is_kept_no_longer() -> None:
    """Once nothing is taken, no more is read."""
    way = Way()
    while way.sides[0].has_room:
        way.send(0, bytes(2**16))
    way.deliver_all()
    assert way.sides[0].has_room


@pytest.mark.parametrize(
    "data", [b"\x02\x00\x00\x00\x01x", b"\x09\x00\x00\x00\x00", b"\x01\xff\xff\xff\xff"]
)
def test_what_is_no_such_stream_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"must be RESUME|is not a valid|a frame of"):
        Resumable().receive(data)


# -- a supervisor that listens ---------------------------------------------------------------------


class Crossing:
    """The runner's side: a connection to a listening supervisor, made again as often as it is cut
    off.
    """

    def __init__(self, directory: Path) -> None:
        self.token, self._connections = secrets.token_hex(16), list[socket.socket]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [
            *COMMAND,
            "--listen",
            str(self.port),
            "--patience-s",
            str(PATIENCE_S),
            "--token-file",
            "/dev/stdin",
        ]
        process = subprocess.Popen(
            command, env=ENVIRONMENT, start_new_session=True, stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        with process.stdin as token_file:
            token_file.write(self.token.encode())
        runner_end, carrier_end = socket.socketpair()
        self.may_connect = True
        self.thread = threading.Thread(target=self._cross, args=[carrier_end])
        self.thread.start()
        kernel = KernelAway()
        link = SupervisorLink(runner_end, "the supervisor", kernel)
        kernel.reach_by(link)
        self.started = Started(process, link, directory)

    def _cross(self, local: socket.socket) -> None:
        with local:
            run_connecting_side(local, self._connect, 60.0)

    def _connect(self) -> socket.socket:
        if not self.may_connect:
            raise LookupError("it is not to be reached")
        self._connections.append(connection := frames.connect(("127.0.0.1", self.port), self.token))
        return connection

    @property
    def count(self) -> int:
        """The number of connections so far."""
        return len(self._connections)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._connections[-1].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.started.close()
        self.thread.join(10.0)


@pytest.fixture
def crossing(tmp_path: Path) -> Iterator[Crossing]:
    made = Crossing(tmp_path)
    yield made
    made.close()


@pytest.mark.costly
def test_a_connection_that_is_cut_again_and_again_costs_nothing(
    crossing: Crossing, tmp_path: Path
) -> None:
    """Neither records that are written meanwhile nor requests are lost."""
    remote, local = tmp_path / "there", tmp_path / "here"
    crossing.started.link.ship(remote, local, "")
    writer = crossing.started.start("write", remote / "journal" / "node0.jsonl")
    for _ in range(CUTS):
        before = crossing.count
        crossing.cut()
        wait_until(lambda before=before: crossing.count > before, "another connection")  # type: ignore[misc]
        assert not crossing.started.link.kernel.is_gone(writer)
    crossing.started.end(writer)
    written = (remote / "journal" / "node0.jsonl").read_bytes()
    crossing.started.link.settle(remote)
    assert len(written) > 1000
    assert (local / "journal" / "node0.jsonl").read_bytes() == written


@pytest.mark.costly
def test_what_goes_there_survives_cuts_too(crossing: Crossing, tmp_path: Path) -> None:
    """The data is so large that each side must acknowledge it, and data comes back all the time."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "data.bin").write_bytes(os.urandom(16 * 2**20))
    source = Source(job)
    crossing.started.link.ship(tmp_path / "there", tmp_path / "here", "")
    crossing.started.start("write", tmp_path / "there" / "journal" / "node0.jsonl")
    over = threading.Event()

    def cut() -> None:
        while not over.wait(0.1):
            crossing.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        crossing.started.link.store(source, tmp_path / "sources")
    finally:
        over.set()
        cutter.join()
    assert crossing.count > 1
    assert (tmp_path / "sources" / source.digest / "data.bin").read_bytes() == (
        job / "data.bin"
    ).read_bytes()


def test_both_sides_can_speak_at_once() -> None:
    """Each side sends more than a connection holds, and does not read before its data was taken."""
    size_bytes = 5 * 2**20
    ends, carried = [], socket.socketpair()
    for connection in carried:
        runner_end, carrier_end = socket.socketpair()
        ends.append(runner_end)
        threading.Thread(
            target=StreamCarrier(carrier_end).carry, args=[connection], daemon=True
        ).start()
    senders = [
        threading.Thread(target=end.sendall, args=[bytes(size_bytes)], daemon=True) for end in ends
    ]
    for end in ends:
        end.settimeout(60.0)
    for sender in senders:
        sender.start()
    for end in ends:
        assert len(frames.receive_exactly(end, size_bytes)) == size_bytes
    for sender in senders:
        sender.join(60.0)
    for end in ends:
        end.close()


def test_an_end_is_told_on_the_next_connection() -> None:
    """The data before it arrives, too; the first connection broke after the end."""
    (here, local_here), (there, local_there) = socket.socketpair(), socket.socketpair()
    sender, receiver = StreamCarrier(local_here), StreamCarrier(local_there)
    first_connection, broken_end = socket.socketpair()
    here.sendall(b"the last words")
    here.close()
    broken_end.close()
    assert not sender.carry(first_connection)
    first, second = socket.socketpair()
    other = threading.Thread(target=receiver.carry, args=[second])
    other.start()
    assert sender.carry(first)
    other.join(10.0)
    there.settimeout(10.0)
    assert frames.receive_exactly(there, 14) == b"the last words"


@pytest.mark.costly
def test_a_connection_that_hangs_is_replaced_by_the_next_one(crossing: Crossing) -> None:
    """The listening side may not know yet that the connection is dead.

    A stranger without the token does not replace it.
    """
    stays = crossing.started.start("stay")
    with socket.create_connection(("127.0.0.1", crossing.port)) as stranger:
        stranger.sendall(b"x" * 100)
        assert not crossing.started.link.kernel.is_gone(stays)
        assert crossing.count == 1
    with frames.connect(("127.0.0.1", crossing.port), crossing.token):
        wait_until(lambda: crossing.count == 2, "another connection")
        assert not crossing.started.link.kernel.is_gone(stays)


@pytest.mark.costly
def test_a_supervisor_that_no_runner_comes_to_ends(crossing: Crossing) -> None:
    """The supervisor ends with all programs that it has started."""
    stays = crossing.started.start("stay")
    crossing.may_connect = False
    began_s = time.monotonic()
    crossing.cut()
    crossing.started.process.wait(PATIENCE_S + 20.0)
    assert time.monotonic() - began_s > PATIENCE_S - 0.5
    wait_until(lambda: not Path(f"/proc/{stays.pid}").exists(), "the end of its program")


@pytest.mark.costly
def test_a_runner_that_ends_is_known_at_once(crossing: Crossing) -> None:
    crossing.started.link.close()
    crossing.started.process.wait(PATIENCE_S - 1.0)
