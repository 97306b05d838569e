"""The network between two nodes: connect, round trips, and one stream each way, over a connection that both prove.

By hand the side that listens exists only while somebody tests; in a run it is the keeper of each node.
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
from chaoskit.health.limits import Limits
from chaoskit.health.pair_protocol import (
    Digest,
    Echo,
    Echoed,
    Give,
    Look,
    Seen,
    Take,
    TooSlow,
    decode,
    give,
    take,
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
_RAMP_TRIPS = 6  # 10 segments, and twice as many with each round trip: 256 KiB are through in five
_RAMP_LEAST = 0.01
_MB = 1e6


class PairServer:
    """Answers pair tests of whoever knows the token, until it is closed. Those who test at once share the way.

    Args:
        listener: a listening socket, which is ours from now on.
        niceness: of the threads that answer.
        silent_s: whoever says nothing for so long is sent away.

    Attributes:
        address: host and port where it listens.
        served: tests that began.
    """

    def __init__(
        self, token: str, listener: socket.socket, *, niceness: int = 0, silent_s: float = _SILENT_S
    ) -> None:
        self._token, self._listener, self._silent_s, self.served = token, listener, silent_s, 0
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._tests: dict[socket.socket, threading.Thread] = {}
        self._room = threading.BoundedSemaphore(_TESTS_MAX)
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
        """End the tests that are under way, and listen no more."""
        with self._lock:
            self._closed = True
            tests = dict(self._tests)
            for one in (self._listener, *tests):
                with suppress(OSError):  # it has ended by itself
                    one.shutdown(socket.SHUT_RDWR)
        for thread in (self._thread, *tests.values()):
            thread.join()
        self._listener.close()

    def _serve(self, niceness: int) -> None:
        if niceness:
            lower_priority(niceness)  # of the threads that are started here, too
        for connection in proven(self._listener, self._token, timeout_s=self._silent_s):
            self._room.acquire()
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
        try:
            with suppress(OSError, ChaoskitError):  # the other side tells its user what it met
                self._answer(connection)
        finally:
            with self._lock:
                del self._tests[connection]
                connection.close()
            self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(self._silent_s)
        with self._lock:
            self.served += 1
        while True:
            match frames.receive(connection, decode):
                case Echo(number):
                    frames.send(connection, Echoed(number, time.time_ns()))
                case Take(size_bytes):
                    frames.send(connection, Digest(take(connection, size_bytes)))
                case Give(size_bytes):
                    frames.send(connection, Digest(give(connection, size_bytes)))
                case Look():
                    frames.send(connection, Seen(tcp.path(connection).mb_s))
                case _:
                    raise Refused("not a request of a pair test")


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
    """Test the way to a :class:`PairServer`, and back.

    Args:
        node: the name of the other side.
        silent_s: the other side is given up when it says nothing for so long.
        limit_s: and when the whole test takes longer, whatever it says.
    """
    known = PairReading(address=f"{address[0]}:{address[1]}", node=node)
    began_s = time.monotonic()
    try:
        with frames.connect(address, token, silent_s) as connection:
            known = msgspec.structs.replace(known, connect_ms=(time.monotonic() - began_s) * 1e3)
            connection.settimeout(silent_s)
            rtt_ms, offset_ms = _ping(connection, pings)
            path_ms = tcp.path(connection).rtt_ms
            known = msgspec.structs.replace(
                known, rtt_ms=rtt_ms, offset_ms=offset_ms, path_ms=path_ms
            )
            return _stream(connection, stream_bytes, known, began_s + limit_s)
    except TimeoutError:
        return msgspec.structs.replace(known, error=f"silent for {silent_s:g} s")
    except TooSlow:
        return msgspec.structs.replace(known, error=f"not through in {limit_s:g} s")
    except (OSError, Refused) as error:
        return msgspec.structs.replace(known, error=str(error))


def _ping(connection: socket.socket, pings: int) -> tuple[tuple[float, ...], float]:
    """Round trips in ms, and the offset of the other clock in ms, from the shortest of them."""
    trips = []
    for number in range(pings):
        sent_ns, sent_wall_ns = time.monotonic_ns(), time.time_ns()
        frames.send(connection, Echo(number))
        echoed = frames.receive(connection, decode)
        rtt_ns = time.monotonic_ns() - sent_ns
        if not isinstance(echoed, Echoed) or echoed.number != number:
            raise Refused("not the echo of a pair test")
        trips.append((rtt_ns / 1e6, ahead_ms(echoed.wall_ns, sent_wall_ns, rtt_ns)))
    return tuple(rtt_ms for rtt_ms, _ in trips), min(trips)[1]


def _stream(
    connection: socket.socket, size_bytes: int, known: PairReading, until_s: float
) -> PairReading:
    began_s = time.monotonic()
    frames.send(connection, Take(size_bytes))
    mine = give(connection, size_bytes, until_s)
    theirs = frames.receive(connection, decode)
    sent_s = time.monotonic()
    path_sent_mb_s = tcp.path(connection).mb_s
    frames.send(connection, Give(size_bytes))
    received = take(connection, size_bytes, until_s)
    promised = frames.receive(connection, decode)
    received_s = time.monotonic()
    frames.send(connection, Look())
    seen = frames.receive(connection, decode)
    return msgspec.structs.replace(
        known,
        sent_mb_s=size_bytes / _MB / (sent_s - began_s),
        received_mb_s=size_bytes / _MB / (received_s - sent_s),
        intact=theirs == Digest(mine) and promised == Digest(received),
        path_sent_mb_s=path_sent_mb_s,
        path_received_mb_s=seen.mb_s if isinstance(seen, Seen) else 0.0,
    )


def of_path(reading: PairReading, stream_bytes: int) -> PairReading:
    """The same, as good as the way itself: without what else took the time of a small test.

    Beside a training both processes wait for a CPU or a lock most of the time: the kernels know better. And a short
    stream that has far to go is over before TCP has found out how much fits in.
    """
    best_ms = min((*reading.rtt_ms, *([reading.path_ms] if reading.path_ms else [])), default=0.0)
    ramp_s = _RAMP_TRIPS * best_ms / 1e3

    def without_ramp(*seen_mb_s: float) -> float:
        if not (mb_s := max(seen_mb_s)):
            return 0.0
        took_s = stream_bytes / _MB / mb_s
        return stream_bytes / _MB / max(took_s - ramp_s, took_s * _RAMP_LEAST)

    return msgspec.structs.replace(
        reading,
        rtt_ms=(best_ms,) if reading.rtt_ms else (),
        sent_mb_s=without_ramp(reading.sent_mb_s, reading.path_sent_mb_s),
        received_mb_s=without_ramp(reading.received_mb_s, reading.path_received_mb_s),
    )


def judge(reading: PairReading, limits: Limits) -> list[Finding]:
    """Whether two nodes can train together over this way."""
    look = "look at the link between the two (ethtool -S, ip -s link), and at who else uses it"
    if reading.error:
        remedy = "see that the other side listens, that no firewall is between, and that both have the same token"
        return [bad("pair.reached", "no", remedy, f"{reading.address}: {reading.error}")]
    found = [
        good("pair.reached", "yes", reading.address),
        at_most("pair.connect_ms", reading.connect_ms, bad=limits.pair_connect_max_ms, remedy=look),
    ]
    if reading.rtt_ms:
        rtt_ms, most_ms = statistics.median(reading.rtt_ms), max(reading.rtt_ms)
        warn, most = limits.pair_rtt_warn_ms, limits.pair_rtt_max_ms
        found.append(
            at_most(
                "pair.rtt_ms",
                rtt_ms,
                warn=warn,
                bad=most,
                remedy=look,
                detail=f"most {most_ms:.3g}",
            )
        )
        warn, most = limits.clock_offset_warn_ms, limits.clock_offset_max_ms
        ntp = "let both nodes follow the same NTP servers"
        found.append(
            at_most("clock.offset_ms", abs(reading.offset_ms), warn=warn, bad=most, remedy=ntp)
        )
    warn, least = limits.pair_throughput_warn_mb_s, limits.pair_throughput_min_mb_s
    for what, value in (
        ("pair.sent_mb_s", reading.sent_mb_s),
        ("pair.received_mb_s", reading.received_mb_s),
    ):
        found.append(at_least(what, value, warn=warn, bad=least, remedy=look))
    if reading.intact:
        return [*found, good("pair.intact", "yes")]
    remedy = "keep the node out: bytes change on the way, which checksums of TCP did not show"
    return [*found, bad("pair.intact", "no", remedy)]
