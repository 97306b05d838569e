"""A byte stream that outlives the connections which carry it, as a port-forward that is cut and made again.

Each side runs beside the end that it carries for, in a process of its own. What one side has sent it keeps until the
other one has taken it; a new connection goes on from there. Every connection begins with the proof of the token.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from queue import Queue

from chaoskit.errors import ChaoskitError
from chaoskit.process.linux import set_name
from chaoskit.substrate.supervisor.stream import watch
from chaoskit.wire.handshakes import proven

#: A side that has no connection for so long gives the stream up.
PATIENCE_S = 60.0
_KEPT_BYTES_MAX = 2**20  # of what the other side has not said to have taken: then no more is read
_TAKEN_BYTES = 2**14  # so much is taken before that is said
_PIECE_BYTES = 2**16
_AGAIN_S = 0.2
_HEADER = struct.Struct("!BI")
_COUNT = struct.Struct("!Q")


class Kind(IntEnum):
    """The kind of a frame. ``RESUME`` is the first on each connection: how many bytes this side has taken so far."""

    RESUME = 1
    DATA = 2
    TAKEN = 3
    END = 4


class Resumable:
    """One side of such a stream, without I/O.

    Attributes:
        is_over: whether the other side has ended the stream.
    """

    def __init__(self) -> None:
        self._kept = bytearray()  # sent, and not said to have been taken
        self._kept_from = self._taken = self._said = 0  # bytes since the stream began
        self._frames, self._resumed, self._ended = bytearray(), False, False
        self.is_over = False

    @property
    def has_room(self) -> bool:
        """Whether more can be sent."""
        return len(self._kept) < _KEPT_BYTES_MAX

    def begin(self) -> bytes:
        """The first bytes on a new connection."""
        self._frames.clear()
        self._resumed, self._said = False, self._taken
        return _frame(Kind.RESUME, _COUNT.pack(self._taken))

    def send(self, data: bytes) -> bytes:
        """Keep what is to be sent. Gives what goes on the connection now: nothing before the other side has begun."""
        self._kept += data
        return _frame(Kind.DATA, data) if self._resumed else b""

    def end(self) -> bytes:
        """Nothing is to be sent any more."""
        self._ended = True
        return _frame(Kind.END) if self._resumed else b""

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Take in what has come on the connection. Gives what is new of the stream, and what is to be answered.

        Raises:
            ValueError: if that is no such stream.
        """
        self._frames += data
        new, answer = bytearray(), bytearray()
        while (frame := self._next_frame()) is not None:
            kind, body = frame
            if self._resumed == (kind is Kind.RESUME):
                raise ValueError("a connection begins with what was taken so far, once")
            if kind is Kind.DATA:
                new += body
                self._taken += len(body)
            elif kind is Kind.END:
                self.is_over = True
            else:
                self._let_go(*_COUNT.unpack(body))
            if kind is Kind.RESUME:
                self._resumed = True
                answer += _frame(Kind.DATA, bytes(self._kept)) if self._kept else b""
                answer += _frame(Kind.END) if self._ended else b""
        if self._taken - self._said >= _TAKEN_BYTES:
            self._said = self._taken
            answer += _frame(Kind.TAKEN, _COUNT.pack(self._taken))
        return bytes(new), bytes(answer)

    def _next_frame(self) -> tuple[Kind, bytes] | None:
        if len(self._frames) < _HEADER.size:
            return None
        kind, size = _HEADER.unpack_from(self._frames)
        if size > _KEPT_BYTES_MAX + _PIECE_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        if len(self._frames) < _HEADER.size + size:
            return None
        body = bytes(self._frames[_HEADER.size : _HEADER.size + size])
        if kind in (Kind.RESUME, Kind.TAKEN) and size != _COUNT.size:
            raise ValueError(f"a count of {size} bytes")
        del self._frames[: _HEADER.size + size]
        return Kind(kind), body

    def _let_go(self, taken: int) -> None:
        if not self._kept_from <= taken <= self._kept_from + len(self._kept):
            raise ValueError(
                f"{taken} bytes were taken, of which {self._kept_from} to {len(self._kept)} more are kept"
            )
        del self._kept[: taken - self._kept_from]
        self._kept_from = taken


def _frame(kind: Kind, body: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(body)) + body


class Ferry:
    """Carries the stream of a local socket over one connection after the other. It never waits for one side to read
    while the other one has something to say.
    """

    def __init__(self, local: socket.socket) -> None:
        local.setblocking(False)
        self._local, self._stream = local, Resumable()
        self._is_open = True  # the local end
        self._due_here = bytearray()  # taken, and not written to the local end yet

    def carry(self, connection: socket.socket, wakes: int | None = None) -> bool:
        """Carry the stream over this connection. Whether it was the last one: both ends know that it has ended.

        Args:
            wakes: a descriptor: when that is readable, there is a newer connection.
        """
        connection.setblocking(False)
        due_there = bytearray(self._stream.begin())
        with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
            while not (self._is_over and not due_there):
                heard = [one for one in (connection.fileno(), wakes) if one is not None]
                heard += [self._local.fileno()] if self._is_open and self._stream.has_room else []
                told = [connection.fileno()] if due_there else []
                told += [self._local.fileno()] if self._due_here else []
                readable, writable, _ = select.select(heard, told, [])
                if wakes in readable:
                    return False
                if self._local.fileno() in writable:
                    self._write_here()
                if connection.fileno() in writable:
                    del due_there[: connection.send(due_there)]
                if self._local.fileno() in readable:
                    due_there += self._read_here()
                if connection.fileno() in readable:
                    data = connection.recv(_PIECE_BYTES)
                    if not data:
                        return False
                    new, answer = self._stream.receive(data)
                    self._due_here += new
                    due_there += answer
                if (
                    self._is_over and self._is_open
                ):  # the other side is told that all of it has come
                    self._is_open = False
                    due_there += self._stream.end()
            return True
        return False

    @property
    def _is_over(self) -> bool:
        """Whether the other side has ended the stream, and all of it is here."""
        return self._stream.is_over and not self._due_here

    def _read_here(self) -> bytes:
        try:
            data = self._local.recv(_PIECE_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if data:
            return self._stream.send(data)
        self._is_open = False
        return self._stream.end()

    def _write_here(self) -> None:
        try:
            del self._due_here[: self._local.send(self._due_here)]
        except BlockingIOError:
            pass
        except OSError:  # the end here is gone, as is read next
            self._due_here.clear()


def cross(local: socket.socket, connect: Callable[[], socket.socket], patience_s: float) -> str:
    """The side that connects: carry a local socket until its stream ends. Gives why it was given up; "" if it was not.

    Args:
        connect: makes a connection, and proves the token on it. It raises OSError or an error of chaoskit where that
            fails, and :class:`LookupError` where it will fail for ever.
        patience_s: until the first connection.
    """
    ferry, until_s = Ferry(local), time.monotonic() + patience_s
    while True:
        try:
            connection = connect()
        except LookupError as error:
            return str(error)
        except (OSError, ChaoskitError) as error:
            if time.monotonic() > until_s:
                return str(error)
        else:
            if ferry.carry(connection):
                return ""
            until_s = time.monotonic() + PATIENCE_S
        time.sleep(_AGAIN_S)


def land(port: int, token: str, patience_s: float) -> tuple[int, socket.socket]:
    """The side that is connected to: listen on this port of the loopback, in a process of its own.

    Gives its pid, and the end of the stream. That ends when there was no connection for ``patience_s``.

    Raises:
        OSError: if the port is in use.
    """
    listener = socket.create_server(("127.0.0.1", port))
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        listener.close()
        theirs.close()
        return pid, ours
    try:
        ours.close()
        set_name("ck-ferry")
        _serve(listener, token, theirs, patience_s)
    finally:
        os._exit(0)


def _serve(listener: socket.socket, token: str, local: socket.socket, patience_s: float) -> None:
    come, (wakes, woken) = Queue[socket.socket](), socket.socketpair()

    def accept() -> None:
        for connection in proven(listener, token):
            watch(connection)
            come.put(connection)
            woken.send(b"+")

    threading.Thread(target=accept, daemon=True).start()
    ferry = Ferry(local)
    while select.select([wakes], [], [], patience_s)[0]:
        wakes.recv(1)
        if ferry.carry(come.get(), wakes.fileno()):
            return
