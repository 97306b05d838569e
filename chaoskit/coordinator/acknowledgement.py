"""Acknowledgements of probes by the kernels of nodes, independent of the agents there.

-> wire/lease.py: when a node is asked, and how an acknowledgement extends its lease.
coordinator/detectors/contact.py: when a node is lost.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Protocol

#: Fields of ``struct tcp_info`` in linux/tcp.h. Linux has all three since version 4.6.
_UNACKNOWLEDGED = struct.Struct("24xI")
_RECEIVED = struct.Struct("140xII")


class _ProbedConnection(Protocol):
    def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes: ...


class _Segments(NamedTuple):
    unacknowledged: int  # sent, and neither acknowledged nor given up
    received: int  # so far, with data or without
    unsent_bytes: int

    @property
    def is_shut(self) -> bool:
        """True if the other end has reported a full receive window.

        Its kernel is alive, although nothing can be sent to it.
        """
        return self.unsent_bytes > 0 and self.unacknowledged == 0


class Acknowledgements:
    """Finder of the nodes with a kernel that has sent a segment since its node was asked.

    A kernel acknowledges what it has received within 40 ms, also while the process that should read
    it is stopped, or its machine is busy. A machine that is cut off, paused or gone does not.
    Acknowledgements are counted as segments: some of what was sent may have been lost, and is
    acknowledged only when it was sent again. No node is found if the kernel here does not count
    segments.
    """

    def __init__(self) -> None:
        # node -> its connection, and the number of segments received before
        self._asked: dict[str, tuple[_ProbedConnection, int]] = {}

    def ask(self, node: str, connection: _ProbedConnection) -> None:
        """Note the segments received from ``node`` so far, just before a message is sent to it.

        Nothing changes while an earlier question to the node is unanswered. Nor does it if the
        kernel here does not count segments, or the connection has ended.
        """
        if node not in self._asked and (segments := _read(connection)) is not None:
            self._asked[node] = (connection, segments.received)

    def take(self) -> list[str]:
        """Return the nodes with a kernel that has answered since it was asked, each once.

        A full receive window counts as an answer. Each node can then be asked again.
        """
        answered = [node for node, asked in self._asked.items() if _has_answered(*asked)]
        for node in answered:
            del self._asked[node]
        return answered

    def forget(self, node: str) -> None:
        """Forget the open question to ``node``, as its connection has ended."""
        self._asked.pop(node, None)


def _has_answered(connection: _ProbedConnection, before: int) -> bool:
    segments = _read(connection)
    return segments is not None and (segments.received != before or segments.is_shut)


def _read(connection: _ProbedConnection) -> _Segments | None:
    """Return the kernel's counters of a connection; None without counters or after its end."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    except OSError:
        return None
    if len(info) < _RECEIVED.size:
        return None
    return _Segments(*_UNACKNOWLEDGED.unpack_from(info), *_RECEIVED.unpack_from(info))
