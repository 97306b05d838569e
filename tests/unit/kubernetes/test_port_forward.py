"""A socket over a WebSocket: what is only for the connection keeps nothing from being carried."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from chaoskit.substrate.kubernetes.port_forward import carry

websocket = pytest.importorskip("websocket", reason="the client of Kubernetes is not installed")

PONG, CLOSE = b"\x8a\x00", b"\x88\x00"


def carried() -> tuple[socket.socket, socket.socket, threading.Thread]:
    """The end that is carried, and the server's side of the WebSocket."""
    (ours, local), (ws_side, server) = socket.socketpair(), socket.socketpair()
    remote: Any = websocket.WebSocket()
    remote.sock, remote.connected = ws_side, True
    thread = threading.Thread(target=carry, args=[local, remote], daemon=True)
    thread.start()
    for one in (ours, server):
        one.settimeout(20.0)
    return ours, server, thread


def read_frame(server: socket.socket) -> bytes:
    """The data of a short frame of a client: masked."""
    head = server.recv(2)
    mask, size = server.recv(4), head[1] & 0x7F
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(server.recv(size)))


def test_an_answer_to_a_ping_holds_up_nothing() -> None:
    """It comes on a stream that was quiet for a while; what is said next is carried."""
    ours, server, thread = carried()
    server.sendall(PONG)
    ours.sendall(b"hello")
    assert read_frame(server) == b"\x00hello"
    server.sendall(b"\x82\x06\x00world")
    assert ours.recv(10) == b"world"
    server.sendall(PONG)
    ours.close()
    thread.join(20.0)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "last", [CLOSE, b"\x82\x04\x01bad", b""], ids=["a close", "an error", "the end"]
)
def test_the_end_of_the_websocket_is_that_of_the_socket(last: bytes) -> None:
    ours, server, thread = carried()
    server.sendall(last)
    if not last:
        server.close()
    assert ours.recv(10) == b""
    thread.join(20.0)
    assert not thread.is_alive()
