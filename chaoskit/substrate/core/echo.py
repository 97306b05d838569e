"""Measures the way between two stations beside the job: ICMP echoes, which the kernel of the other one answers."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import Protocol

from chaoskit.process.linux import await_readable

_ECHO, _ANSWER = 8, 0
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence
_PAYLOAD = b"chaoskit" * 7
_RAW_BYTES_MAX = 2048
_PAUSE_S = 0.005  # between two echoes of a probe


def open_socket() -> socket.socket:
    """Return a socket for echoes from the station in the namespace of the caller.

    Raises:
        PermissionError: without CAP_NET_RAW.
    """
    return socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_ICMP)


class Echoes:
    """Echoes from one station.

    Args:
        opened: made by :func:`open_socket` in the namespace of the station; taken over.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._identifier = int.from_bytes(os.urandom(2), "big")
        self._sequence = 0

    def round_trips_ms(self, address: str, count: int, timeout_s: float) -> list[float]:
        """Send so many echoes, one after the other. Those that take longer than ``timeout_s`` are left out."""
        found = [self._round_trip_s(address, timeout_s) for _ in range(count)]
        return [seconds * 1000 for seconds in found if seconds is not None]

    def _round_trip_s(self, address: str, timeout_s: float) -> float | None:
        self._sequence = (self._sequence + 1) & 0xFFFF
        head = _HEADER.pack(_ECHO, 0, 0, self._identifier, self._sequence)
        packet = (
            _HEADER.pack(_ECHO, 0, _checksum(head + _PAYLOAD), self._identifier, self._sequence)
            + _PAYLOAD
        )
        sent_s = time.monotonic()
        try:
            self._socket.sendto(packet, (address, 0))
        except OSError:  # no way there: the link is down, or the other side was not found
            return None
        # what came in time counts, also where this thread had no CPU to look at it
        while await_readable(
            [self._socket.fileno()], max(0.0, sent_s + timeout_s - time.monotonic())
        ):
            if self._is_answer(self._socket.recv(_RAW_BYTES_MAX)):
                return time.monotonic() - sent_s
        return None

    def _is_answer(self, data: bytes) -> bool:
        """``data`` begins with an IP header."""
        start = (data[0] & 0xF) * 4
        kind, _, _, identifier, sequence = _HEADER.unpack_from(data, start)
        return (kind, identifier, sequence) == (_ANSWER, self._identifier, self._sequence)

    def close(self) -> None:
        self._socket.close()


class EchoProbe(Protocol):
    """Sends echoes from one station to another one, one after the other, until it is closed."""

    def results_ms(self) -> list[float | None]:
        """The round trips so far, in the order in which the echoes were sent; None for one that was lost."""

    def close(self) -> None:
        """Send no further one."""


class EchoThread:
    """A probe in a thread of its own.

    Args:
        timeout_s: an echo that has no answer by then is lost.
    """

    def __init__(self, echoes: Echoes, address: str, timeout_s: float) -> None:
        self._echoes, self._address, self._timeout_s = echoes, address, timeout_s
        self._found: list[float | None] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="ck-echoes", daemon=True)
        self._thread.start()

    def results_ms(self) -> list[float | None]:
        return list(self._found)

    def _ask(self) -> None:
        while not self._closed.is_set():
            answered = self._echoes.round_trips_ms(self._address, 1, self._timeout_s)
            self._found.append(answered[0] if answered else None)
            self._closed.wait(_PAUSE_S)
        self._echoes.close()

    def close(self) -> None:
        self._closed.set()


def _checksum(data: bytes) -> int:
    """RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
