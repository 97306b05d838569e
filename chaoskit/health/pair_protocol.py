"""Messages of a pair test, and the streams between them.

-> ``health/pair.py``: both sides of the test.
"""

from __future__ import annotations

import math
import os
import socket
import time

import xxhash

from chaoskit.errors import Refused
from chaoskit.wire import frames
from chaoskit.wire.messages import Message

STREAM_BYTES_MAX = 2**30
_PIECE_BYTES = 2**18
# no link can compress it; made once, before a run forks its processes
_NOISE = memoryview(os.urandom(_PIECE_BYTES))


class Echo(Message, frozen=True):
    """Request to be answered at once."""

    number: int


class Echoed(Message, frozen=True):
    """Answer to :class:`Echo`. ``wall_ns``: the wall clock of the answering side."""

    number: int
    wall_ns: int


class Take(Message, frozen=True):
    """Announcement of ``size_bytes`` bytes that follow, without a frame.

    The answer is their :class:`Digest`.
    """

    size_bytes: int


class Give(Message, frozen=True):
    """Request for ``size_bytes`` bytes, without a frame; then their :class:`Digest` follows."""

    size_bytes: int


class Digest(Message, frozen=True):
    """Digest of the bytes that were received, or sent."""

    hexdigest: str


class LookAtConnection(Message, frozen=True):
    """Question about the other kernel's measurement of this connection."""


class Seen(Message, frozen=True):
    """Answer to :class:`LookAtConnection`: the rate at which the sent bytes have arrived."""

    mb_s: float


decode = frames.decoder(Echo | Echoed | Take | Give | Digest | LookAtConnection | Seen)


def _checked_size(size_bytes: int) -> int:
    """Return ``size_bytes``. Raise Refused if it is no size of a stream."""
    if not 0 < size_bytes <= STREAM_BYTES_MAX:
        raise Refused(f"a stream of {size_bytes} bytes is not allowed: use 1 to {STREAM_BYTES_MAX}")
    return size_bytes


class LinkTooSlow(Exception):
    """The time limit of the whole test has passed."""


def _require_time_left(until_s: float) -> None:
    """Raise LinkTooSlow if the monotonic clock has passed ``until_s``."""
    if time.monotonic() > until_s:
        raise LinkTooSlow


def receive_stream(connection: socket.socket, size_bytes: int, until_s: float = math.inf) -> str:
    """Receive a stream, and return its digest in hexadecimal.

    Raises:
        ConnectionError: if the stream ends early.
        OSError: if the connection fails in another way, such as by its time limit.
        LinkTooSlow: if the monotonic clock passes ``until_s``.
        Refused: if the size is not allowed.
    """
    buffer, digest = (
        memoryview(bytearray(min(_checked_size(size_bytes), _PIECE_BYTES))),
        xxhash.xxh3_64(),
    )
    left = size_bytes
    while left:
        _require_time_left(until_s)
        count = connection.recv_into(buffer[: min(left, _PIECE_BYTES)])
        if not count:
            raise ConnectionError("connection closed by the other side")
        digest.update(buffer[:count])
        left -= count
    return digest.hexdigest()


def send_stream(connection: socket.socket, size_bytes: int, until_s: float = math.inf) -> str:
    """Send a stream of random bytes, and return its digest in hexadecimal.

    Raises:
        OSError: if the connection fails.
        LinkTooSlow: if the monotonic clock passes ``until_s``.
        Refused: if the size is not allowed.
    """
    digest = xxhash.xxh3_64()
    for sent in range(0, _checked_size(size_bytes), _PIECE_BYTES):
        _require_time_left(until_s)
        part = _NOISE[: size_bytes - sent]
        connection.sendall(part)
        digest.update(part)
    return digest.hexdigest()
