"""Round-trip times between two stations, measured by ICMP echoes beside the traffic of the job.

A station is a node or the coordinator, as the network of a run sees it. The kernel of the other
station answers the echoes.

-> ``netns/substrate.py`` and ``network/packets.py`` open the sockets in a station's namespace.
"""

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
    """Return a raw socket that sends echoes from the network namespace of the caller.

    Raises:
        PermissionError: without CAP_NET_RAW.
    """
    return socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_ICMP)


class Echoes:
    """Sender of echoes from one station.

    Args:
        echo_socket: a socket of :func:`open_socket`, opened in the namespace of the station. This
            object closes it.
    """

    def __init__(self, echo_socket: socket.socket) -> None:
        self._socket = echo_socket
        self._identifier = int.from_bytes(os.urandom(2), "big")
        self._sequence = 0

    def round_trips_ms(self, address: str, count: int, timeout_s: float) -> list[float]:
        """Send ``count`` echoes one after the other and return their round trips.

        Echoes that cannot be sent, or are not answered within ``timeout_s``, are left out.
        """
        round_trips_s = [self._round_trip_s(address, timeout_s) for _ in range(count)]
        return [seconds * 1000 for seconds in round_trips_s if seconds is not None]

    def _round_trip_s(self, address: str, timeout_s: float) -> float | None:
        """Send an echo and return its round trip.

        None is returned if it cannot be sent or is not answered within ``timeout_s``.
        """
        self._sequence = (self._sequence + 1) & 0xFFFF
        head = _HEADER.pack(_ECHO, 0, 0, self._identifier, self._sequence)
        packet = (
            _HEADER.pack(_ECHO, 0, _checksum(head + _PAYLOAD), self._identifier, self._sequence)
            + _PAYLOAD
        )
        sent_s = time.monotonic()
        try:
            self._socket.sendto(packet, (address, 0))
        except OSError:  # no route: the link is down, or ARP got no answer
            return None
        # an answer that arrived in time counts even if this thread had no CPU to read it
        while await_readable(
            [self._socket.fileno()], max(0.0, sent_s + timeout_s - time.monotonic())
        ):
            if self._is_answer(self._socket.recv(_RAW_BYTES_MAX)):
                return time.monotonic() - sent_s
        return None

    def _is_answer(self, data: bytes) -> bool:
        """Return whether a packet, which begins with its IP header, answers the last echo."""
        start = (data[0] & 0xF) * 4
        kind, _, _, identifier, sequence = _HEADER.unpack_from(data, start)
        return (kind, identifier, sequence) == (_ANSWER, self._identifier, self._sequence)

    def close(self) -> None:
        self._socket.close()


class EchoProbe(Protocol):
    """Sender of echoes from one station to another, one after the other, until it is closed."""

    def results_ms(self) -> list[float | None]:
        """Return the round trips so far in the order of sending; None for each lost echo."""

    def close(self) -> None:
        """Send no further echoes."""


class EchoThread:
    """A probe that sends its echoes from a thread of its own, which closes ``echoes`` at the end.

    Args:
        timeout_s: an echo without an answer by then is lost.
    """

    def __init__(self, echoes: Echoes, address: str, timeout_s: float) -> None:
        self._echoes, self._address, self._timeout_s = echoes, address, timeout_s
        self._results_ms: list[float | None] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send_echoes, name="ck-echoes", daemon=True)
        self._thread.start()

    def results_ms(self) -> list[float | None]:
        return list(self._results_ms)

    def _send_echoes(self) -> None:
        while not self._closed.is_set():
            answered = self._echoes.round_trips_ms(self._address, 1, self._timeout_s)
            self._results_ms.append(answered[0] if answered else None)
            self._closed.wait(_PAUSE_S)
        self._echoes.close()

    def close(self) -> None:
        self._closed.set()


def _checksum(data: bytes) -> int:
    """Return the RFC 1071 checksum of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
