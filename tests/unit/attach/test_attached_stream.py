"""The WebSocket of a hand: time limits of the handshake, of messages, and of its end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.waiting import wait_until

from chaoskit.attach.hands.attached_stream import AttachedStream
from chaoskit.substrate.kubernetes.api.web_socket import open_web_socket

pytest.importorskip("kubernetes", reason="no Kubernetes client: pip install 'chaoskit[kubernetes]'")
LIMIT_S = 0.3
FRAME = bytes([0x82, 5, 1]) + b"line"  # a binary message of the output


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[AttachedStream, socket.socket]]:
    """Return a stream, and the other end of its connection; the parameter is its time limit."""
    from websocket import WebSocket

    near_end, far_end = socket.socketpair()
    web_socket: Any = WebSocket()
    web_socket.sock, web_socket.connected = near_end, True
    web_socket.settimeout(getattr(request, "param", LIMIT_S))
    yield AttachedStream(web_socket), far_end
    near_end.close()
    far_end.close()


def test_output_is_received_and_its_end_is_known(
    ends: tuple[AttachedStream, socket.socket],
) -> None:
    stream, far_end = ends
    assert stream.receive(0.01) is None
    far_end.sendall(FRAME)
    assert stream.receive(1.0) == b"line"
    far_end.sendall(bytes([0x82, 2, 3]) + b"x")  # the status of the API server
    assert stream.receive(1.0) == b""


def test_a_stream_that_is_closed_without_a_status_shows_no_end_of_its_container(
    ends: tuple[AttachedStream, socket.socket],
) -> None:
    stream, far_end = ends
    far_end.sendall(bytes([0x88, 0]))
    with pytest.raises(OSError, match="no end of its container"):
        stream.receive(1.0)


def test_the_reason_of_the_end_of_a_program_is_kept(
    ends: tuple[AttachedStream, socket.socket],
) -> None:
    stream, far_end = ends
    assert stream.complaint() == ""
    far_end.sendall(message(2, b"Traceback\nSyntaxError: invalid syntax\n"))
    assert stream.receive(1.0) is None
    far_end.sendall(message(3, b'{"status": "Failure", "message": "exit code 1"}'))
    assert stream.receive(1.0) == b""
    assert stream.complaint() == "exit code 1; SyntaxError: invalid syntax"


@pytest.mark.parametrize("status", [b'{"status": "Success"}', b"not JSON", b"[]"])
def test_a_program_that_ends_well_has_no_complaint(
    ends: tuple[AttachedStream, socket.socket], status: bytes
) -> None:
    stream, far_end = ends
    far_end.sendall(message(3, status))
    assert stream.receive(1.0) == b""
    assert stream.complaint() == ""


def message(channel: int, data: bytes) -> bytes:
    """Return a binary message of a channel; its size has one byte."""
    return bytes([0x82, 1 + len(data), channel]) + data


def test_a_message_that_stops_in_its_middle_breaks_the_stream(
    ends: tuple[AttachedStream, socket.socket],
) -> None:
    stream, far_end = ends
    far_end.sendall(FRAME[:4])
    with pytest.raises(OSError, match="has broken"):
        stream.receive(1.0)


@pytest.mark.parametrize("ends", [None], indirect=True)  # it would wait for ever
def test_a_stream_is_closed_while_a_thread_receives(
    ends: tuple[AttachedStream, socket.socket],
) -> None:
    stream, far_end = ends
    far_end.sendall(FRAME[:4])
    results = list[object]()

    def receive() -> None:
        try:
            results.append(stream.receive(60.0))
        except OSError as error:
            results.append(error)

    reader = threading.Thread(target=receive)
    reader.start()
    stream.close()
    reader.join(10.0)
    wait_until(lambda: results, "the end of the reader")


def test_a_server_that_accepts_and_does_not_answer_is_given_up() -> None:
    from kubernetes.client import Configuration

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/attach"
        began_s = time.monotonic()
        with pytest.raises(Exception, match="timed out"):
            open_web_socket(Configuration(), url, {}, LIMIT_S)
        assert time.monotonic() - began_s < 30.0
