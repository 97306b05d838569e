"""A new TCP connection from the pod, which shows whether packets pass in both directions.

-> ``hand/network/operations.py`` has the operation ``connect``.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import Any

#: Results of an attempt, by the number of its error. It is EINPROGRESS while nothing has come back.
_RESULTS = {
    0: "connected",
    errno.ECONNREFUSED: "refused",
    errno.EINPROGRESS: "timeout",
    errno.ETIMEDOUT: "timeout",
}


def connect(address: str, port: int, limit_s: float) -> dict[str, Any]:
    """Try to open a TCP connection, close it, and return its result.

    Returns:
        ``how``: ``connected``; ``refused``, if a reset came back; ``timeout``; or ``failed``, with
        the name of the ``error``. ``took_ms``: the time until then.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    began_s = time.monotonic()
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setblocking(False)
        number = attempt.connect_ex((address, port))
        if number == errno.EINPROGRESS and select.select([], [attempt], [], limit_s)[1]:
            number = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    took_ms = round(1000 * (time.monotonic() - began_s), 3)
    if number in _RESULTS:
        return {"how": _RESULTS[number], "took_ms": took_ms}
    error = errno.errorcode.get(number, str(number))
    return {"how": "failed", "error": error, "took_ms": took_ms}
