"""A byte stream that survives the connections that carry it, such as an unreliable port-forward.

Each side runs beside the end that it carries data for, in a process of its own. It keeps sent data
until the other side has acknowledged it, and a new connection continues from there. Every
connection begins with the proof of the token.

-> ``kubernetes/port_forward.py``: the connections. ``supervisor/server.py`` (``--listen``): the
accepting side.
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

#: A side gives the stream up after so long without a connection.
PATIENCE_S = 60.0
_KEPT_BYTES_MAX = 2**20  # unacknowledged data at which reading pauses
_TAKEN_BYTES = 2**14  # received data after which an acknowledgement is sent
_PIECE_BYTES = 2**16
_AGAIN_S = 0.2
_HEADER = struct.Struct("!BI")
_COUNT = struct.Struct("!Q")


class Kind(IntEnum):
    """Kind of a frame.

    ``RESUME`` is the first frame on each connection. It holds how many bytes this side has received
    so far, as ``TAKEN`` does later.
    """

    RESUME = 1
    DATA = 2
    TAKEN = 3
    END = 4


class Resumable:
    """Protocol of one side of a resumable stream, without I/O.

    Each method that returns bytes returns what the caller must write to the present connection.

    Attributes:
        is_over: True if the other side has ended the stream.
    """

    def __init__(self) -> None:
        self._unacknowledged = bytearray()  # sent, not acknowledged
        self._unacknowledged_from = 0  # offset in the stream, as are the next two
        self._received_bytes = 0
        self._acknowledged_bytes = 0
        self._unparsed, self._is_resumed, self._has_ended = bytearray(), False, False
        self.is_over = False

    @property
    def has_room(self) -> bool:
        """True if :meth:`send` may be called: less than 1 MiB is unacknowledged."""
        return len(self._unacknowledged) < _KEPT_BYTES_MAX

    def begin(self) -> bytes:
        """Return the first bytes for a new connection."""
        self._unparsed.clear()
        self._is_resumed, self._acknowledged_bytes = False, self._received_bytes
        return _frame(Kind.RESUME, _COUNT.pack(self._received_bytes))

    def send(self, data: bytes) -> bytes:
        """Keep data until it is acknowledged.

        Return what to write now: nothing before the other side has resumed.
        """
        self._unacknowledged += data
        return _frame(Kind.DATA, data) if self._is_resumed else b""

    def end(self) -> bytes:
        """End this direction of the stream. Return what to write now, as :meth:`send`."""
        self._has_ended = True
        return _frame(Kind.END) if self._is_resumed else b""

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Process data of the connection. Return new data of the stream, and what to answer.

        Raises:
            ValueError: if the data are not frames of this protocol.
        """
        self._unparsed += data
        new, answer = bytearray(), bytearray()
        while (frame := self._next_frame()) is not None:
            kind, body = frame
            if self._is_resumed == (kind is Kind.RESUME):
                raise ValueError("the first frame of a connection, and only that, must be RESUME")
            if kind is Kind.DATA:
                new += body
                self._received_bytes += len(body)
            elif kind is Kind.END:
                self.is_over = True
            else:
                self._drop_acknowledged(*_COUNT.unpack(body))
            if kind is Kind.RESUME:
                self._is_resumed = True
                answer += (
                    _frame(Kind.DATA, bytes(self._unacknowledged)) if self._unacknowledged else b""
                )
                answer += _frame(Kind.END) if self._has_ended else b""
        if self._received_bytes - self._acknowledged_bytes >= _TAKEN_BYTES:
            self._acknowledged_bytes = self._received_bytes
            answer += _frame(Kind.TAKEN, _COUNT.pack(self._received_bytes))
        return bytes(new), bytes(answer)

    def _next_frame(self) -> tuple[Kind, bytes] | None:
        """Remove the next frame and return it, or None if it is incomplete.

        Raises ValueError if it is too large, or is no frame of this protocol.
        """
        if len(self._unparsed) < _HEADER.size:
            return None
        kind, size = _HEADER.unpack_from(self._unparsed)
        if size > _KEPT_BYTES_MAX + _PIECE_BYTES:
            raise ValueError(f"a frame of {size} bytes is too large")
        if len(self._unparsed) < _HEADER.size + size:
            return None
        body = bytes(self._unparsed[_HEADER.size : _HEADER.size + size])
        if kind in (Kind.RESUME, Kind.TAKEN) and size != _COUNT.size:
            raise ValueError(f"a count has {_COUNT.size} bytes, not {size}")
        del self._unparsed[: _HEADER.size + size]
        return Kind(kind), body

    def _drop_acknowledged(self, taken: int) -> None:
        """Drop kept data up to offset ``taken``, which the other side has acknowledged.

        Raises ValueError if no such data were sent.
        """
        kept_bytes = len(self._unacknowledged)
        if not 0 <= taken - self._unacknowledged_from <= kept_bytes:
            raise ValueError(
                f"{taken} bytes were acknowledged, but only {kept_bytes} bytes from offset "
                f"{self._unacknowledged_from} are kept"
            )
        del self._unacknowledged[: taken - self._unacknowledged_from]
        self._unacknowledged_from = taken


def _frame(kind: Kind, body: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(body)) + body


class StreamCarrier:
    """Carrier of a local socket's data over successive connections.

    It never waits for one side to read while the other has data.
    """

    def __init__(self, local: socket.socket) -> None:
        local.setblocking(False)
        self._local, self._stream = local, Resumable()
        self._is_open = True  # the local socket can be read
        self._received = bytearray()  # received, not written to the local socket yet

    def carry(self, connection: socket.socket, wakes: int | None = None) -> bool:
        """Carry the stream over a connection, which is closed at the end.

        Return True if it was the last: both ends know that the stream is over. Return False if the
        stream must go on over another connection.

        Args:
            wakes: descriptor that is readable when there is a newer connection.
        """
        connection.setblocking(False)
        unsent = bytearray(self._stream.begin())
        with contextlib.closing(connection), contextlib.suppress(OSError, ValueError):
            while not (self._is_over and not unsent):
                readers = [
                    descriptor
                    for descriptor in (connection.fileno(), wakes)
                    if descriptor is not None
                ]
                readers += [self._local.fileno()] if self._is_open and self._stream.has_room else []
                writers = [connection.fileno()] if unsent else []
                writers += [self._local.fileno()] if self._received else []
                readable, writable, _ = select.select(readers, writers, [])
                if wakes in readable:
                    return False
                if self._local.fileno() in writable:
                    self._write_here()
                if connection.fileno() in writable:
                    del unsent[: connection.send(unsent)]
                if self._local.fileno() in readable:
                    unsent += self._read_here()
                if connection.fileno() in readable:
                    data = connection.recv(_PIECE_BYTES)
                    if not data:
                        return False
                    new, answer = self._stream.receive(data)
                    self._received += new
                    unsent += answer
                if self._is_over and self._is_open:  # confirm that everything has arrived
                    self._is_open = False
                    unsent += self._stream.end()
            return True
        return False

    @property
    def _is_over(self) -> bool:
        """True if the other side has ended the stream, and all its data was written here."""
        return self._stream.is_over and not self._received

    def _read_here(self) -> bytes:
        """Read from the local socket, and return what to write to the connection."""
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
        """Write received data to the local socket, as much as it accepts."""
        try:
            del self._received[: self._local.send(self._received)]
        except BlockingIOError:
            pass
        except OSError:  # the local end is gone; the next read detects it
            self._received.clear()


def run_connecting_side(
    local: socket.socket, connect: Callable[[], socket.socket], patience_s: float
) -> str:
    """Run the connecting side: carry a local socket until its stream ends.

    Args:
        connect: makes a connection and proves the token on it. It raises OSError or a chaoskit
            error on failure, and :class:`LookupError` if all further tries would fail.
        patience_s: time until the first connection. Later connections must follow within 60 s.

    Returns:
        Why the stream was given up; "" if it ended in order.
    """
    carrier, until_s = StreamCarrier(local), time.monotonic() + patience_s
    while True:
        try:
            connection = connect()
        except LookupError as error:
            return str(error)
        except (OSError, ChaoskitError) as error:
            if time.monotonic() > until_s:
                return str(error)
        else:
            if carrier.carry(connection):
                return ""
            until_s = time.monotonic() + PATIENCE_S
        time.sleep(_AGAIN_S)


def start_accepting_side(port: int, token: str, patience_s: float) -> tuple[int, socket.socket]:
    """Run the accepting side in a process of its own, which listens on a port of the loopback.

    The stream ends after ``patience_s`` without a connection. The process does not return here.

    Returns:
        The pid of the process, and the local end of the stream.

    Raises:
        OSError: if the port is in use.
    """
    listener = socket.create_server(("127.0.0.1", port))
    local, remote = socket.socketpair()
    pid = os.fork()
    if pid:
        listener.close()
        remote.close()
        return pid, local
    try:
        local.close()
        set_name("ck-stream")
        _serve(listener, token, remote, patience_s)
    finally:
        os._exit(0)


def _serve(listener: socket.socket, token: str, local: socket.socket, patience_s: float) -> None:
    """Carry the stream over each new connection, until it is over or none comes in time."""
    accepted, (wake_reader, wake_writer) = Queue[socket.socket](), socket.socketpair()

    def accept() -> None:
        for connection in proven(listener, token):
            watch(connection)
            accepted.put(connection)
            wake_writer.send(b"+")

    threading.Thread(target=accept, daemon=True).start()
    carrier = StreamCarrier(local)
    while select.select([wake_reader], [], [], patience_s)[0]:
        wake_reader.recv(1)
        if carrier.carry(accepted.get(), wake_reader.fileno()):
            return
