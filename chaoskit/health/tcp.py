"""What the kernel has seen of a connection: it counts when segments go and are acknowledged, whoever has a CPU."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_INFO_BYTES = 256
_MIN_RTT_AT, _DELIVERY_RATE_AT = (
    148,
    160,
)  # in struct tcp_info of <linux/tcp.h>: microseconds, bytes a second
_UNKNOWN = 2**32 - 1
_MB = 1e6


class Path(NamedTuple):
    """Shortest round trip, and the rate at which what we sent was delivered lately; 0 where the kernel is silent."""

    rtt_ms: float
    mb_s: float


def path(connection: socket.socket) -> Path:
    """Of a TCP connection, by TCP_INFO of tcp(7)."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (rtt_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
        (bytes_per_s,) = struct.unpack_from("=Q", info, _DELIVERY_RATE_AT)
    except (OSError, struct.error):  # an older kernel, or none of Linux's
        return Path(0.0, 0.0)
    return Path(0.0 if rtt_us == _UNKNOWN else rtt_us / 1e3, bytes_per_s / _MB)
