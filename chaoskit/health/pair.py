"""Test of the network between two nodes over an authenticated connection.

It measures the time to connect, round trips, and one stream each way. In a test by hand, the
listening side exists only for the time of the test; in a run it is the checkpoint daemon of each
node.

-> ``daemon/link_probe.py``: tests in a run. ``coordinator/detectors/link_speed.py`` and
``coordinator/detectors/newcomers.py``: when they are made.
-> ``coordinator/detectors/links.py``: nodes that are cut off altogether.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from contextlib import suppress
from types import TracebackType

import msgspec

from chaoskit.errors import ChaoskitError, Refused
from chaoskit.health import tcp
from chaoskit.health.clock import ahead_ms
from chaoskit.health.finding import at_least, at_most, bad, good
from chaoskit.health.limits import HealthLimits
from chaoskit.health.pair_protocol import (
    Digest,
    Echo,
    Echoed,
    Give,
    LinkTooSlow,
    LookAtConnection,
    Seen,
    Take,
    decode,
    receive_stream,
    send_stream,
)
from chaoskit.process.linux import lower_priority
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven
from chaoskit.wire.messages import Finding, PairReading

PINGS = 20
STREAM_BYTES = 16 * 2**20
_SILENT_S = 10.0
_LIMIT_S = 300.0
_TESTS_MAX = 16
_RAMP_TRIPS = 6  # TCP sends 10 segments, and doubles them with each round trip: 256 KiB take five
_RAMP_LEAST = 0.01
_MB = 1e6


class PairServer:
    """Server of pair tests for clients that know the token, from its construction to its close.

    Concurrent tests share the bandwidth. At most 16 run at a time, and more clients wait.

    Args:
        token: the token that clients must know.
        listener: a listening socket, which the server closes.
        niceness: niceness of the threads that answer.
        silent_s: time after which a silent client is disconnected.

    Attributes:
        address: host and port of the listener.
        served: number of tests that began.
    """

    def __init__(
        self, token: str, listener: socket.socket, *, niceness: int = 0, silent_s: float = _SILENT_S
    ) -> None:
        self._token, self._listener, self._silent_s, self.served = token, listener, silent_s, 0
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._tests: dict[socket.socket, threading.Thread] = {}
        self._free_tests = threading.BoundedSemaphore(_TESTS_MAX)
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(
            target=self._serve, args=(niceness,), name="pair-tests", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> PairServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the running tests, and stop to listen. Waits for the threads."""
        with self._lock:
            self._closed = True
            tests = dict(self._tests)
            for endpoint in (self._listener, *tests):
                with suppress(OSError):  # the connection has ended by itself
                    endpoint.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *tests.values()):
            thread.join()
        self._listener.close()

    def _serve(self, niceness: int) -> None:
        """Start a thread for each client until the server is closed, a limited number at a time."""
        if niceness:
            lower_priority(niceness)  # holds for the threads that are started here, too
        for connection in proven(self._listener, self._token, timeout_s=self._silent_s):
            self._free_tests.acquire()
            thread = threading.Thread(
                target=self._test, args=(connection,), name="pair-test", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._tests[connection] = thread
                thread.start()

    def _test(self, connection: socket.socket) -> None:
        """Answer one client, and close the connection. Errors are dropped."""
        try:
            with suppress(OSError, ChaoskitError):  # the other side reports the problem to its user
                self._answer(connection)
        finally:
            with self._lock:
                del self._tests[connection]
                connection.close()
            self._free_tests.release()

    def _answer(self, connection: socket.socket) -> None:
        """Answer the requests of one client until the connection fails or ends, which raises."""
        connection.settimeout(self._silent_s)
        with self._lock:
            self.served += 1
        while True:
            match frames.receive(connection, decode):
                case Echo(number):
                    frames.send(connection, Echoed(number, time.time_ns()))
                case Take(size_bytes):
                    frames.send(connection, Digest(receive_stream(connection, size_bytes)))
                case Give(size_bytes):
                    frames.send(connection, Digest(send_stream(connection, size_bytes)))
                case LookAtConnection():
                    frames.send(connection, Seen(tcp.path(connection).mb_s))
                case _:
                    raise Refused("the message is not a request of a pair test")


def read(
    address: tuple[str, int],
    token: str,
    *,
    node: str = "",
    pings: int = PINGS,
    stream_bytes: int = STREAM_BYTES,
    silent_s: float = _SILENT_S,
    limit_s: float = _LIMIT_S,
) -> PairReading:
    """Test the path to a :class:`PairServer`, and back, and return the reading.

    A failure is not raised: the reading has it as ``error``, beside the measurements before it.

    Args:
        address: host and port of the server.
        token: secret that the server knows.
        node: name of the other side, for the reading.
        pings: number of round trips.
        stream_bytes: size of the stream in each direction.
        silent_s: time after which a silent other side is given up.
        limit_s: time limit of the whole test, which is checked during the streams.
    """
    reading = PairReading(address=f"{address[0]}:{address[1]}", node=node)
    began_s = time.monotonic()
    try:
        with frames.connect(address, token, silent_s) as connection:
            reading = msgspec.structs.replace(
                reading, connect_ms=(time.monotonic() - began_s) * 1e3
            )
            connection.settimeout(silent_s)
            rtt_ms, offset_ms = _ping(connection, pings)
            path_ms = tcp.path(connection).rtt_ms
            reading = msgspec.structs.replace(
                reading, rtt_ms=rtt_ms, offset_ms=offset_ms, path_ms=path_ms
            )
            return _stream(connection, stream_bytes, reading, began_s + limit_s)
    except TimeoutError:
        return msgspec.structs.replace(reading, error=f"silent for {silent_s:g} s")
    except LinkTooSlow:
        return msgspec.structs.replace(reading, error=f"not finished in {limit_s:g} s")
    except (OSError, Refused) as error:
        return msgspec.structs.replace(reading, error=str(error))


def _ping(connection: socket.socket, pings: int) -> tuple[tuple[float, ...], float]:
    """Return the times of ``pings`` round trips and the offset of the other clock, both in ms.

    The offset is positive if the other clock is ahead. Raise Refused at a wrong answer.
    """
    trips = []
    for number in range(pings):
        sent_ns, sent_wall_ns = time.monotonic_ns(), time.time_ns()
        frames.send(connection, Echo(number))
        echoed = frames.receive(connection, decode)
        rtt_ns = time.monotonic_ns() - sent_ns
        if not isinstance(echoed, Echoed) or echoed.number != number:
            raise Refused("the answer is not the echo of a pair test")
        trips.append((rtt_ns / 1e6, ahead_ms(echoed.wall_ns, sent_wall_ns, rtt_ns)))
    return tuple(rtt_ms for rtt_ms, _ in trips), min(trips)[1]


def _stream(
    connection: socket.socket, size_bytes: int, reading: PairReading, until_s: float
) -> PairReading:
    """Send a stream, receive another one, and return the reading with both rates.

    Raise LinkTooSlow if the monotonic clock passes ``until_s``.
    """
    began_s = time.monotonic()
    frames.send(connection, Take(size_bytes))
    sent_digest = send_stream(connection, size_bytes, until_s)
    reported_digest = frames.receive(connection, decode)
    sent_s = time.monotonic()
    path_sent_mb_s = tcp.path(connection).mb_s
    frames.send(connection, Give(size_bytes))
    received_digest = receive_stream(connection, size_bytes, until_s)
    promised_digest = frames.receive(connection, decode)
    received_s = time.monotonic()
    frames.send(connection, LookAtConnection())
    report = frames.receive(connection, decode)
    return msgspec.structs.replace(
        reading,
        sent_mb_s=size_bytes / _MB / (sent_s - began_s),
        received_mb_s=size_bytes / _MB / (received_s - sent_s),
        intact=reported_digest == Digest(sent_digest)
        and promised_digest == Digest(received_digest),
        path_sent_mb_s=path_sent_mb_s,
        path_received_mb_s=report.mb_s if isinstance(report, Seen) else 0.0,
    )


def without_overhead(reading: PairReading, stream_bytes: int) -> PairReading:
    """Return a reading of the path alone, without the overhead of a small test.

    Its only round trip is the shortest. Beside a training, both processes wait for a CPU or a lock
    most of the time: the measurements of the kernels are better. A short stream over a long path is
    over before TCP has found its rate.

    Args:
        reading: the reading of a test; its error is kept.
        stream_bytes: size of the stream in each direction of that test.
    """
    best_ms = min((*reading.rtt_ms, *([reading.path_ms] if reading.path_ms else [])), default=0.0)
    ramp_s = _RAMP_TRIPS * best_ms / 1e3

    def without_ramp(*rates_mb_s: float) -> float:
        if not (mb_s := max(rates_mb_s)):
            return 0.0
        took_s = stream_bytes / _MB / mb_s
        return stream_bytes / _MB / max(took_s - ramp_s, took_s * _RAMP_LEAST)

    return msgspec.structs.replace(
        reading,
        rtt_ms=(best_ms,) if reading.rtt_ms else (),
        sent_mb_s=without_ramp(reading.sent_mb_s, reading.path_sent_mb_s),
        received_mb_s=without_ramp(reading.received_mb_s, reading.path_received_mb_s),
    )


def judge(reading: PairReading, limits: HealthLimits) -> list[Finding]:
    """Return the findings on a path over which two nodes are to train.

    If the test failed, the error is the only finding. Changed bytes are bad; a slow path or an
    offset of the clocks is a warning or bad, by the limits.
    """
    link_remedy = "check the link between the nodes (ethtool -S, ip -s link), and its other traffic"
    if reading.error:
        remedy = (
            "check that the other side listens, that no firewall blocks it, "
            "and that both sides have the same token"
        )
        return [bad("pair.reached", "no", remedy, f"{reading.address}: {reading.error}")]
    findings = [
        good("pair.reached", "yes", reading.address),
        at_most(
            "pair.connect_ms",
            reading.connect_ms,
            bad=limits.pair_connect_max_ms,
            remedy=link_remedy,
        ),
    ]
    if reading.rtt_ms:
        rtt_ms, most_ms = statistics.median(reading.rtt_ms), max(reading.rtt_ms)
        warn, most = limits.pair_rtt_warn_ms, limits.pair_rtt_max_ms
        findings.append(
            at_most(
                "pair.rtt_ms",
                rtt_ms,
                warn=warn,
                bad=most,
                remedy=link_remedy,
                detail=f"longest {most_ms:.3g}",
            )
        )
        warn, most = limits.clock_offset_warn_ms, limits.clock_offset_max_ms
        ntp_remedy = "synchronise both nodes with the same NTP servers"
        findings.append(
            at_most(
                "clock.offset_ms", abs(reading.offset_ms), warn=warn, bad=most, remedy=ntp_remedy
            )
        )
    warn, least = limits.pair_throughput_warn_mb_s, limits.pair_throughput_min_mb_s
    for what, rate_mb_s in (
        ("pair.sent_mb_s", reading.sent_mb_s),
        ("pair.received_mb_s", reading.received_mb_s),
    ):
        findings.append(at_least(what, rate_mb_s, warn=warn, bad=least, remedy=link_remedy))
    if reading.intact:
        return [*findings, good("pair.intact", "yes")]
    remedy = "keep the node out: bytes change in transit, undetected by the checksums of TCP"
    return [*findings, bad("pair.intact", "no", remedy)]
