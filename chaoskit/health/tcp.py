"""Properties of a TCP connection as the kernel measures them, even if this process has no CPU time.

-> ``health/pair.py``: uses them where its own times would be those of a busy process.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_INFO_BYTES = 256
# offsets in struct tcp_info of <linux/tcp.h>, in microseconds and bytes a second
_MIN_RTT_AT, _DELIVERY_RATE_AT = 148, 160
_UNKNOWN = 2**32 - 1
_MB = 1e6


class TcpPath(NamedTuple):
    """Shortest round trip in ms, and recent rate of delivery of the sent bytes.

    The rate is in 10^6 bytes a second. 0 stands for unknown values.
    """

    rtt_ms: float
    mb_s: float


def path(connection: socket.socket) -> TcpPath:
    """Return the properties of a TCP connection, by TCP_INFO of tcp(7)."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        (rtt_us,) = struct.unpack_from("=I", info, _MIN_RTT_AT)
        (bytes_per_s,) = struct.unpack_from("=Q", info, _DELIVERY_RATE_AT)
    except (OSError, struct.error):  # an older kernel, or not Linux
        return TcpPath(0.0, 0.0)
    return TcpPath(0.0 if rtt_us == _UNKNOWN else rtt_us / 1e3, bytes_per_s / _MB)
