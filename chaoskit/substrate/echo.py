"""Measures the way between two stations beside the job: ICMP echoes, which the kernel of the other one answers."""

from __future__ import annotations

import os
import socket
import struct
import time

from chaoskit.osprocess import await_readable

_ECHO, _ANSWER = 8, 0
_HEADER = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence
_PAYLOAD = b"chaoskit" * 7
_RAW_BYTES_MAX = 2048


class Echoes:
    """Must be made in the namespace of the station that asks. Raises PermissionError without CAP_NET_RAW."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_ICMP)
        self._identifier = int.from_bytes(os.urandom(2), "big")
        self._sequence = 0

    def round_trips_ms(self, address: str, count: int, timeout_s: float) -> list[float]:
        """Send so many echoes, one after the other. Those that take longer than ``timeout_s`` are left out."""
        found = [self._round_trip_s(address, timeout_s) for _ in range(count)]
        return [seconds * 1000 for seconds in found if seconds is not None]

    def _round_trip_s(self, address: str, timeout_s: float) -> float | None:
        self._sequence = (self._sequence + 1) & 0xFFFF
        head = _HEADER.pack(_ECHO, 0, 0, self._identifier, self._sequence)
        packet = _HEADER.pack(_ECHO, 0, _checksum(head + _PAYLOAD), self._identifier, self._sequence) + _PAYLOAD
        sent_s = time.monotonic()
        try:
            self._socket.sendto(packet, (address, 0))
        except OSError:  # no way there: the link is down, or the other side was not found
            return None
        while (left_s := sent_s + timeout_s - time.monotonic()) > 0:
            if not await_readable([self._socket.fileno()], left_s):
                return None
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


def _checksum(data: bytes) -> int:
    """RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
