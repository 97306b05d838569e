"""Whether the kernel of a node acknowledges what it is sent, whatever the process there does."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Protocol

#: Of ``struct tcp_info`` in linux/tcp.h: since Linux 4.6, which is where the last of the three came in.
_UNACKNOWLEDGED = struct.Struct("24xI")
_RECEIVED = struct.Struct("140xII")


class _Connection(Protocol):
    def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes: ...


class _Segments(NamedTuple):
    unacknowledged: int  # sent, and neither acknowledged nor given up
    received: int  # so far, with data or without
    unsent_bytes: int

    @property
    def is_shut(self) -> bool:
        """Whether the other end has said that it has no room: its kernel lives, and can be sent nothing."""
        return self.unsent_bytes > 0 and self.unacknowledged == 0


class Acknowledgements:
    """Tells which nodes' kernels have sent a segment since they were asked.

    A kernel acknowledges what it has received within 40 ms, while the process that should read it is stopped, or its
    machine is busy. A machine that is cut off, paused or gone does not. Acknowledgements are counted as segments: some
    of what was sent may have been lost, and is acknowledged only when it was sent again. Where the kernel here does
    not count them, none is found.
    """

    def __init__(self) -> None:
        self._asked: dict[
            str, tuple[_Connection, int]
        ] = {}  # its connection, and the segments received before

    def ask(self, node: str, connection: _Connection) -> None:
        """Something is about to be sent to ``node``, for its kernel to acknowledge."""
        if node not in self._asked and (segments := _read(connection)) is not None:
            self._asked[node] = (connection, segments.received)

    def take(self) -> list[str]:
        """Return the nodes whose kernels have answered since they were asked; each once."""
        answered = [node for node, asked in self._asked.items() if _has_answered(*asked)]
        for node in answered:
            del self._asked[node]
        return answered

    def forget(self, node: str) -> None:
        """The connection to ``node`` has ended."""
        self._asked.pop(node, None)


def _has_answered(connection: _Connection, before: int) -> bool:
    segments = _read(connection)
    return segments is not None and (segments.received != before or segments.is_shut)


def _read(connection: _Connection) -> _Segments | None:
    """Return what the kernel here counts of a connection; None if it does not, or the connection is closed."""
    try:
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    except OSError:
        return None
    if len(found) < _RECEIVED.size:
        return None
    return _Segments(*_UNACKNOWLEDGED.unpack_from(found), *_RECEIVED.unpack_from(found))
