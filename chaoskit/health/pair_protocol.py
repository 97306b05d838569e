"""What the two sides of a pair test say to each other, and the streams between what they say."""

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
_NOISE = memoryview(
    os.urandom(_PIECE_BYTES)
)  # which no link can compress; made once, before a run forks its processes


class Echo(Message, frozen=True):
    """To be answered at once."""

    number: int


class Echoed(Message, frozen=True):
    """``wall_ns``: the wall clock of who answers."""

    number: int
    wall_ns: int


class Take(Message, frozen=True):
    """``size_bytes`` bytes follow, without a frame."""

    size_bytes: int


class Give(Message, frozen=True):
    """Asks for ``size_bytes`` bytes, without a frame; their digest follows as :class:`Digest`."""

    size_bytes: int


class Digest(Message, frozen=True):
    """Of the bytes that were received, or sent."""

    hexdigest: str


class Look(Message, frozen=True):
    """Asks what the other kernel has seen of this connection."""


class Seen(Message, frozen=True):
    """Answers :class:`Look`: the rate at which what was given has arrived here."""

    mb_s: float


decode = frames.decoder(Echo | Echoed | Take | Give | Digest | Look | Seen)


def _checked(size_bytes: int) -> int:
    if not 0 < size_bytes <= STREAM_BYTES_MAX:
        raise Refused(f"a stream of {size_bytes} bytes: use 1 to {STREAM_BYTES_MAX}")
    return size_bytes


class TooSlow(Exception):
    """The whole test takes too long."""


def _in_time(until_s: float) -> None:
    if time.monotonic() > until_s:
        raise TooSlow


def take(connection: socket.socket, size_bytes: int, until_s: float = math.inf) -> str:
    """Receive a stream; its digest."""
    buffer, digest = (
        memoryview(bytearray(min(_checked(size_bytes), _PIECE_BYTES))),
        xxhash.xxh3_64(),
    )
    left = size_bytes
    while left:
        _in_time(until_s)
        count = connection.recv_into(buffer[: min(left, _PIECE_BYTES)])
        if not count:
            raise ConnectionError("connection closed by the other side")
        digest.update(buffer[:count])
        left -= count
    return digest.hexdigest()


def give(connection: socket.socket, size_bytes: int, until_s: float = math.inf) -> str:
    """Send a stream; its digest."""
    digest = xxhash.xxh3_64()
    for sent in range(0, _checked(size_bytes), _PIECE_BYTES):
        _in_time(until_s)
        part = _NOISE[: size_bytes - sent]
        connection.sendall(part)
        digest.update(part)
    return digest.hexdigest()
