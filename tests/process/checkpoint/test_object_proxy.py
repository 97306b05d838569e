"""Tests of the proxy in front of an object store: it imposes troubles, counts them, and ends with
its launcher.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nodes.network import refusing
from support.waiting import LIMIT_S, wait_until

from chaoskit.fixtures.s3_server import S3Server
from chaoskit.process.linux import is_ending, start_ticks
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.object_store.troubles import (
    ErrorReply,
    Garble,
    Lag,
    ResetConnection,
    Stall,
    StoreOutage,
    StoreTroubles,
    Truncate,
)
from chaoskit.substrate.undo import UndoLog

BODY = os.urandom(300_000)
SIGNED = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request"
}  # signed with arbitrary keys


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path) -> str:
    name = f"b{abs(hash(tmp_path)) % 10**12}"
    s3_server.make_bucket(name)
    return name


def ask(
    proxy: ObjectProxy, method: str, path: str, body: bytes = b"", timeout_s: float = LIMIT_S
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s)
    try:
        connection.request(method, path, body or None, SIGNED)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- what it means ---------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 10))
def test_some_requests_are_spared(spared: int, most: int, count: int) -> None:
    """A trouble strikes requests of its methods, after ``spared`` ones and at most ``most``."""
    ailments = StoreTroubles()
    number = ailments.impose(ErrorReply(spared=spared, most=most, methods=("PUT",)))
    struck = [ailments.rule("PUT", "/b/k").reply for _ in range(count)]
    end = spared + most if most else count
    assert [reply is not None for reply in struck] == [
        spared <= index < end for index in range(count)
    ]
    assert ailments.rule("GET", "/b/k").reply is None
    assert ailments.affected_count(number) == 0, "a ruling is no evidence yet"


def test_a_share_of_requests_is_struck() -> None:
    """A trouble with a share strikes about that share of the requests of its path."""
    ailments = StoreTroubles(seed=3)
    ailments.impose(ResetConnection(share=0.25, path="/data"))
    struck = sum(ailments.rule("GET", "/b/data").reset is not None for _ in range(2000))
    assert 400 < struck < 600
    assert ailments.rule("GET", "/b/manifest.json").reset is None


def test_troubles_add_up_and_go() -> None:
    """The oldest reply counts, delays add up, and each trouble ends when it is lifted."""
    ailments = StoreTroubles()
    first, _ = ailments.impose(ErrorReply(503)), ailments.impose(ErrorReply(500))
    ailments.impose(Lag(delay_ms=5.0))
    ailments.impose(Lag(bytes_per_s=10.0))
    ruling = ailments.rule("GET", "/")
    assert ruling.reply == (first, ErrorReply(503)), "the older one counts"
    assert len(ruling.lags) == 2
    ailments.lift(first)
    assert ailments.rule("GET", "/").reply is not None
    assert not ailments.is_out
    outage = ailments.impose(StoreOutage())
    assert ailments.is_out
    ailments.strike_outage()
    assert ailments.lift(outage) == 1


# -- what it does ----------------------------------------------------------------------------------


def test_it_hands_on_everything(s3_proxy: ObjectProxy, bucket: str) -> None:
    """Requests and answers pass unchanged and are counted when there is no trouble."""
    assert ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)[0] == 200
    assert ask(s3_proxy, "GET", f"/{bucket}/key") == (200, BODY)
    assert ask(s3_proxy, "HEAD", f"/{bucket}/key") == (200, b"")
    assert ask(s3_proxy, "GET", f"/{bucket}/none")[0] == 404
    assert ask(s3_proxy, "DELETE", f"/{bucket}/key")[0] == 204
    traffic = s3_proxy.traffic()
    assert traffic.requests == {"PUT": 1, "GET": 2, "HEAD": 1, "DELETE": 1}
    assert traffic.sent_bytes == len(BODY)
    assert len(BODY) < traffic.received_bytes < len(BODY) + 2000


def test_bodies_in_chunks_pass(s3_proxy: ObjectProxy, bucket: str) -> None:
    """A body in chunks passes."""
    connection = http.client.HTTPConnection("127.0.0.1", s3_proxy.port, timeout=LIMIT_S)
    pieces = (BODY[first : first + 70_000] for first in range(0, len(BODY), 70_000))
    connection.request(
        "PUT",
        f"/{bucket}/key",
        pieces,
        {"Transfer-Encoding": "chunked"} | SIGNED,
        encode_chunked=True,
    )
    assert connection.getresponse().status == 200
    connection.close()
    assert s3_proxy.traffic().sent_bytes > len(BODY), "with the framing"


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_refusals(s3_proxy: ObjectProxy, bucket: str, status: int) -> None:
    """A refused request gets the status that was asked for and does not reach the store."""
    number = s3_proxy.impose(ErrorReply(status, methods=("PUT",)))
    got, text = ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)
    assert (got, b"<Code>" in text) == (status, True)
    assert ask(s3_proxy, "GET", f"/{bucket}/key")[0] == 404, "nothing of it arrived"
    assert s3_proxy.lift(number) == 1
    assert ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)[0] == 200


def test_an_outage_turns_connections_away(s3_proxy: ObjectProxy, bucket: str) -> None:
    """An outage resets open connections and new ones, and counts both, until the same port answers
    again.
    """
    kept = socket.create_connection(("127.0.0.1", s3_proxy.port), LIMIT_S)
    kept.sendall(b"GET / HTTP/1.1\r\n")
    ask(
        s3_proxy, "HEAD", f"/{bucket}"
    )  # connections are taken in order: the first one is open, too
    number = s3_proxy.impose(StoreOutage())
    with kept, pytest.raises(ConnectionError):
        kept.recv(1)
    assert s3_proxy.affected_count(number) == 1
    with pytest.raises(ConnectionError):
        ask(s3_proxy, "GET", f"/{bucket}/key")
    assert s3_proxy.lift(number) == 2
    assert ask(s3_proxy, "GET", f"/{bucket}/key")[0] == 404, "the same port answers again"


def test_an_outage_that_meets_nothing_counts_nothing(s3_proxy: ObjectProxy) -> None:
    """A port that refuses connections is no evidence that a node has tried one."""
    assert s3_proxy.lift(s3_proxy.impose(StoreOutage())) == 0


@pytest.mark.parametrize(
    "said", [b"GET\r\n\r\n", b"PUT /b/k HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"]
)
def test_what_is_no_http_ends_its_own_connection_only(
    s3_proxy: ObjectProxy, bucket: str, said: bytes
) -> None:
    """The request has no path, or a chunk with an invalid size; the proxy continues."""
    with socket.create_connection(("127.0.0.1", s3_proxy.port), LIMIT_S) as client:
        client.sendall(said)
        with contextlib.suppress(ConnectionError):
            while client.recv(4096):
                pass
    assert ask(s3_proxy, "GET", f"/{bucket}/key")[0] == 404


def test_resets_in_both_directions(s3_proxy: ObjectProxy, bucket: str) -> None:
    """A reset ends a connection in the middle of a body, in either direction."""
    ask(s3_proxy, "PUT", f"/{bucket}/there", BODY)
    number = s3_proxy.impose(ResetConnection(after_bytes=100_000))
    with pytest.raises(ConnectionError):
        ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)
    with pytest.raises(ConnectionError):
        ask(s3_proxy, "GET", f"/{bucket}/there")
    assert s3_proxy.lift(number) == 2
    assert ask(s3_proxy, "GET", f"/{bucket}/key")[0] == 404, "half a body is no object"


def test_answers_are_cut_and_changed(s3_proxy: ObjectProxy, bucket: str) -> None:
    """An answer is cut at the byte, or one bit of it is changed, until the trouble is lifted."""
    ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)
    number = s3_proxy.impose(Truncate(after_bytes=1000))
    with pytest.raises(http.client.IncompleteRead) as cut:
        ask(s3_proxy, "GET", f"/{bucket}/key")
    assert cut.value.partial == BODY[:1000]
    assert s3_proxy.lift(number) == 1
    number = s3_proxy.impose(Garble())
    _, got = ask(s3_proxy, "GET", f"/{bucket}/key")
    assert got != BODY
    assert (
        sum((received ^ stored).bit_count() for received, stored in zip(got, BODY, strict=True))
        == 1
    )
    assert s3_proxy.lift(number) == 1
    assert ask(s3_proxy, "GET", f"/{bucket}/key") == (200, BODY)


def test_slow_and_silent(s3_proxy: ObjectProxy, bucket: str) -> None:
    """Bytes pass at the rate, answers are late by the delay, and a stall answers nothing."""
    number = s3_proxy.impose(Lag(bytes_per_s=1_000_000))
    begin_s = time.monotonic()
    ask(s3_proxy, "PUT", f"/{bucket}/key", BODY)
    assert time.monotonic() - begin_s > 0.2, "300 kB at 1 MB/s"
    assert s3_proxy.lift(number) == 1
    number = s3_proxy.impose(Lag(delay_ms=100.0))
    begin_s = time.monotonic()
    ask(s3_proxy, "HEAD", f"/{bucket}/key")
    assert time.monotonic() - begin_s > 0.1
    s3_proxy.lift(number)
    number = s3_proxy.impose(Stall())
    with pytest.raises(TimeoutError):
        ask(s3_proxy, "GET", f"/{bucket}/key", timeout_s=0.3)
    assert s3_proxy.lift(number) == 1


LAUNCHER = """
import sys, time
from pathlib import Path
from chaoskit.substrate.object_store.proxy import ObjectProxy
from chaoskit.substrate.undo import UndoLog

proxy = ObjectProxy("127.0.0.1", 1, UndoLog(Path(sys.argv[1])))
print(proxy.process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_ends_with_its_launcher(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    """The proxy of a killed launcher ends by itself."""
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    ticks = start_ticks(pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: start_ticks(pid) != ticks or is_ending(pid), "the end of the proxy")
    wait_until(
        lambda: not list((tmp_path / "undo").iterdir()),
        "the guard to find that nothing is left to do",
    )


def test_a_store_that_is_not_there_resets(undo: UndoLog) -> None:
    """A store that refuses connections looks like a connection that ends."""
    with refusing() as held:
        proxy = ObjectProxy(*held.getsockname(), undo)
        with pytest.raises(ConnectionError):
            ask(proxy, "GET", "/b/k")
        proxy.close()
