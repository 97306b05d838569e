"""The stream between a runner and a supervisor, as both of them keep it."""

from __future__ import annotations

import socket

_IDLE_S, _PROBES_S, _PROBES = 5, 5, 3
_DEAD_S = 20.0


def watch(connection: socket.socket) -> None:
    """Have the kernel find out within 20 s that the other machine, or the way to it, is gone; on TCP.

    A process that is stopped is not gone: its kernel answers, as long as there is room for what comes. So little is
    sent to a side that does not read (:data:`chaoskit.substrate.supervisor.files.IN_FLIGHT_BYTES`).
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _PROBES_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(_DEAD_S * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
