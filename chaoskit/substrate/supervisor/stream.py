"""Keep-alive of the stream between a runner and a supervisor."""

from __future__ import annotations

import socket

_IDLE_S, _PROBES_S, _PROBES = 5, 5, 3
_DEAD_S = 20.0


def watch(connection: socket.socket) -> None:
    """Configure a TCP connection so that the kernel detects the loss of its other end within 20 s.

    Nothing is done for a Unix socket, whose end the kernel reports at once.

    A stopped process is not lost: its kernel answers, as long as its buffers have room. For that
    reason little is sent to a side that does not read
    (:data:`chaoskit.substrate.supervisor.files.IN_FLIGHT_BYTES`).
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, setting in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBES_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(_DEAD_S * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, setting)
