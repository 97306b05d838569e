"""A socket over a WebSocket: control frames of the connection do not hold up data."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from chaoskit.substrate.kubernetes.port_forward import carry

websocket = pytest.importorskip("websocket", reason="the client of Kubernetes is not installed")

PONG, CLOSE = b"\x8a\x00", b"\x88\x00"


def carried() -> tuple[socket.socket, socket.socket, threading.Thread]:
    """Return the carried end of a socket, and the server's side of the WebSocket."""
    (near, local), (ws_side, server) = socket.socketpair(), socket.socketpair()
    remote: Any = websocket.WebSocket()
    remote.sock, remote.connected = ws_side, True
    thread = threading.Thread(target=carry, args=[local, remote], daemon=True)
    thread.start()
    for connection in (near, server):
        connection.settimeout(20.0)
    return near, server, thread


def read_frame(server: socket.socket) -> bytes:
    """Return the data of a short, masked frame of a client."""
    head = server.recv(2)
    mask, size = server.recv(4), head[1] & 0x7F
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(server.recv(size)))


def test_an_answer_to_a_ping_holds_up_nothing() -> None:
    """The ping comes on a stream that was quiet for a while; the next data is carried."""
    near, server, thread = carried()
    server.sendall(PONG)
    near.sendall(b"hello")
    assert read_frame(server) == b"\x00hello"
    server.sendall(b"\x82\x06\x00world")
    assert near.recv(10) == b"world"
    server.sendall(PONG)
    near.close()
    thread.join(20.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "last", [CLOSE, b"\x82\x04\x01bad", b""], ids=["a close", "an error", "the end"]
)
def test_the_end_of_the_websocket_is_that_of_the_socket(last: bytes) -> None:
    near, server, thread = carried()
    server.sendall(last)
    if not last:
        server.close()
    assert near.recv(10) == b""
    thread.join(20.0)
    assert not thread.is_alive()
