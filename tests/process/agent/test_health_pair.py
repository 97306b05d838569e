"""Tests of the network test between two nodes over real sockets: its measurements, and its results
on a bad network.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from support.nodes.network import HOST, refusing
from support.waiting import LIMIT_S, wait_until

from chaoskit.errors import Refused
from chaoskit.health import Finding, HealthLimits, pair
from chaoskit.health.pair import PairServer
from chaoskit.health.pair_protocol import Digest, Give, Take
from chaoskit.wire import frames
from chaoskit.wire.messages import Message, PairReading

TOKEN = "a-token-that-both-sides-know"
LIMITS = HealthLimits()
#: The network inside of this machine is good by any measure, however busy its processors are.
GENEROUS = HealthLimits(
    clock_offset_warn_ms=60_000.0,
    pair_connect_max_ms=60_000.0,
    pair_rtt_warn_ms=60_000.0,
    pair_rtt_max_ms=60_000.0,
    pair_throughput_warn_mb_s=0.0,
    pair_throughput_min_mb_s=0.0,
)
ROUNDING_MS = 0.01


def anywhere() -> socket.socket:
    return socket.create_server((HOST, 0))


@pytest.fixture
def server() -> Iterator[PairServer]:
    with PairServer(TOKEN, anywhere()) as serving:
        yield serving


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.severity for finding in findings if finding.severity != "ok"}


def test_a_good_way_is_measured(server: PairServer) -> None:
    """Round trips, both rates and the offset are measured; the offset of one clock is within its
    own error.
    """
    reading = pair.read(server.address, TOKEN, pings=7, stream_bytes=3 * 2**20 + 5)
    assert (reading.error, reading.intact, len(reading.rtt_ms)) == ("", True, 7)
    assert min(*reading.rtt_ms, reading.connect_ms) > 0
    assert min(reading.sent_mb_s, reading.received_mb_s) > 0
    assert abs(reading.offset_ms) <= min(reading.rtt_ms) / 2 + ROUNDING_MS, "it is the same clock"
    assert wrong(pair.judge(reading, GENEROUS)) == {}


def test_several_test_at_once(server: PairServer) -> None:
    """Tests that overlap are all served."""
    readings: list[PairReading] = []
    threads = [
        threading.Thread(
            target=lambda: readings.append(pair.read(server.address, TOKEN, stream_bytes=2**20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [reading.error for reading in readings] == [""] * 4
    assert server.served == 4


def test_without_the_token_nothing_is_measured(server: PairServer) -> None:
    """A client with another token measures nothing, and the next client is served."""
    reading = pair.read(server.address, "another-token-than-theirs")
    assert wrong(pair.judge(reading, LIMITS)) == {"pair.reached": "bad"}
    assert (reading.rtt_ms, server.served) == ((), 0)
    assert pair.read(server.address, TOKEN, stream_bytes=1).error == "", "the next one is served"


def test_a_port_on_which_nothing_listens() -> None:
    """A refused connection is an error of the reading, and the only finding."""
    with refusing() as held:
        reading = pair.read(held.getsockname(), TOKEN)
    assert "refused" in reading.error
    assert [finding.what for finding in pair.judge(reading, LIMITS)] == ["pair.reached"]


def test_a_listener_that_says_nothing() -> None:
    """The test gives up once the other side has been silent for the limit."""
    with anywhere() as silent:
        reading = pair.read(silent.getsockname(), TOKEN, silent_s=0.2)
    assert reading.error == "silent for 0.2 s"


def test_a_client_that_stays_silent_is_sent_away_when_the_server_ends() -> None:
    """The end of a server waits for no silent client."""
    server = PairServer(TOKEN, anywhere(), silent_s=3600.0)
    with socket.create_connection(server.address) as stranger:
        stranger.recv(1)  # it has been accepted, and is asked for the token
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        wait_until(lambda: not closing.is_alive(), "the end of the server")
        with contextlib.suppress(ConnectionError):
            while stranger.recv(2**16):
                pass


@pytest.mark.parametrize("request_", [Take(2**40), Give(-1), Digest("x")], ids=repr)
def test_what_is_no_request_ends_the_connection(server: PairServer, request_: Message) -> None:
    """A stream of a size that is out of bounds, or an answer instead of a request, ends only its
    own connection.
    """
    with frames.connect(server.address, TOKEN) as connection:
        frames.send(connection, request_)
        connection.settimeout(LIMIT_S)
        with pytest.raises(ConnectionError):
            frames.receive(connection)
    assert pair.read(server.address, TOKEN, stream_bytes=1).error == ""


class Relay:
    """A relay between both sides of one connection, which changes a byte of the data or ends the
    connection.

    Args:
        change_at: the position of the byte towards the server that is changed.
        end_at: after so many bytes towards the server both connections end.
    """

    def __init__(self, server: tuple[str, int], change_at: int = -1, end_at: int = -1) -> None:
        self._server, self._change_at, self._end_at = server, change_at, end_at
        self._listener = anywhere()
        self._listener.settimeout(LIMIT_S)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.settimeout(None)
        server = socket.create_connection(self._server)
        self._threads.append(
            threading.Thread(target=self._hand_on, args=(server, client, False), daemon=True)
        )
        self._threads[-1].start()
        self._hand_on(client, server, True)

    def _hand_on(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        passed_bytes = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                if to_server and passed_bytes <= self._change_at < passed_bytes + len(data):
                    data[self._change_at - passed_bytes] ^= 1
                passed_bytes += len(data)
                target.sendall(data)
                if to_server and 0 <= self._end_at < passed_bytes:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
        self._listener.close()


def test_a_byte_that_changes_on_the_way_is_found(server: PairServer) -> None:
    """A byte that a network changes without its checksum noticing makes the stream not intact."""
    relay = Relay(server.address, change_at=2**20)
    reading = pair.read(relay.address, TOKEN, stream_bytes=2 * 2**20)
    relay.close()
    assert (reading.error, reading.intact) == ("", False)
    assert wrong(pair.judge(reading, GENEROUS)) == {"pair.intact": "bad"}


def test_a_way_that_ends_in_the_middle_tells_what_was_measured_before(server: PairServer) -> None:
    """A connection that ends during the stream leaves the round trips that were measured before."""
    relay = Relay(server.address, end_at=2**20)
    reading = pair.read(relay.address, TOKEN, stream_bytes=4 * 2**20)
    relay.close()
    assert reading.error
    assert reading.rtt_ms
    assert wrong(pair.judge(reading, LIMITS)) == {"pair.reached": "bad"}


GOOD = PairReading(
    address="n:1",
    connect_ms=1.0,
    rtt_ms=(0.1, 0.2, 0.3),
    offset_ms=1.0,
    sent_mb_s=900.0,
    received_mb_s=900.0,
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"rtt_ms": (0.1, 0.2, 900.0)}, {}),  # a single late round trip says nothing of the way
        ({"rtt_ms": (20.0,) * 3}, {"pair.rtt_ms": "warn"}),
        ({"rtt_ms": (900.0,) * 3}, {"pair.rtt_ms": "bad"}),
        ({"connect_ms": 5000.0}, {"pair.connect_ms": "bad"}),
        ({"offset_ms": -150.0}, {"clock.offset_ms": "warn"}),
        ({"offset_ms": 3_600_000.0}, {"clock.offset_ms": "bad"}),
        ({"sent_mb_s": 50.0}, {"pair.sent_mb_s": "warn"}),
        ({"received_mb_s": 1.0}, {"pair.received_mb_s": "bad"}),
    ],
)
def test_a_way_is_judged(changed: dict[str, object], expected: dict[str, str]) -> None:
    """Each value has its own limits, and the median of the round trips counts."""
    assert wrong(pair.judge(msgspec.structs.replace(GOOD, **changed), LIMITS)) == expected


def test_the_kernels_tell_how_good_the_way_is_whatever_the_processes_do(server: PairServer) -> None:
    """The kernel's round trip lies within each one of the processes; its readings count on a busy
    machine.
    """
    reading = pair.read(server.address, TOKEN, stream_bytes=2**20)
    assert 0 < reading.path_ms <= min(reading.rtt_ms) + ROUNDING_MS
    assert min(reading.path_sent_mb_s, reading.path_received_mb_s) > 0
    slow = msgspec.structs.replace(
        GOOD, rtt_ms=(700.0, 900.0), received_mb_s=0.1, path_ms=0.2, path_received_mb_s=900.0
    )
    assert wrong(pair.judge(slow, LIMITS)) == {"pair.rtt_ms": "bad", "pair.received_mb_s": "bad"}
    assert wrong(pair.judge(pair.without_overhead(slow, 2**18), LIMITS)) == {}


def test_a_short_stream_over_a_long_way_is_not_taken_for_a_narrow_one() -> None:
    """The stream takes 256 KiB in a little more than five round trips."""
    far = msgspec.structs.replace(
        GOOD, rtt_ms=(20.0,), path_ms=20.0, sent_mb_s=2.4, received_mb_s=2.4
    )
    assert wrong(pair.judge(pair.without_overhead(far, 2**18), LIMITS)) == {"pair.rtt_ms": "warn"}
    narrow = msgspec.structs.replace(GOOD, path_ms=0.1, sent_mb_s=2.4)
    assert wrong(pair.judge(pair.without_overhead(narrow, 2**18), LIMITS)) == {
        "pair.sent_mb_s": "bad"
    }


def test_a_way_that_is_too_slow_for_the_whole_test_is_given_up(server: PairServer) -> None:
    """The limit of the whole test holds although the other side is never silent."""
    reading = pair.read(server.address, TOKEN, stream_bytes=2**20, limit_s=0.0)
    assert reading.error == "not finished in 0 s"
    assert wrong(pair.judge(reading, LIMITS)) == {"pair.reached": "bad"}


def test_messages_of_a_pair_test_are_no_control_messages() -> None:
    """A message of a pair test is refused where messages of the control plane are read."""
    with pytest.raises(Refused):
        frames.decode(frames.encode(Take(1))[4:])
