"""The server's side of handshakes, for servers with threads: strangers cost no thread, and keep no client waiting."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from chaoskit.errors import Refused
from chaoskit.wire import frames

#: So many connections of one listener may be without a proof at a time: when another one comes, the oldest is closed.
UNPROVEN_MAX = 64
_BREATH_S = 0.02


class Unproven:
    """A connection whose client is asked for a proof.

    Args:
        connection: new; it does not block until the proof is there.
        until_s: when it must be, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket, token: str, until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self._handshake, self._frame = frames.Handshake(token), frames.ShortFrame()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(
            frames.encode(self._handshake.challenge())
        )  # there is room for it in a new socket

    def read(self) -> None:
        """Read what has come, and answer it once that is a proof of the token.

        Raises:
            BlockingIOError: if more is to come. OSError: if the connection has ended. Refused: if this is no proof.
        """
        while missing := self._frame.missing:
            data = self.connection.recv(missing)
            if not data:
                raise ConnectionError("connection closed by the other side")
            self._frame.feed(data)
        self.connection.send(frames.encode(self._handshake.accept(frames.decode(self._frame.body))))
        self.connection.setblocking(True)


class _Entrance:
    def __init__(
        self, listener: socket.socket, token: str, timeout_s: float, unmade: Callable[[int], None]
    ) -> None:
        self._listener, self._token, self._timeout_s, self._unmade = (
            listener,
            token,
            timeout_s,
            unmade,
        )
        self._unproven: dict[int, Unproven] = {}  # by descriptor, the oldest first

    def wait(self) -> list[int]:
        """Descriptors at which there is something to do: at least one, or the time of a connection is over."""
        poll = select.poll()
        for fd in (self._listener.fileno(), *self._unproven):
            poll.register(fd, select.POLLIN)
        first = next(iter(self._unproven.values()), None)
        left_s = max(0.0, first.until_s - time.monotonic()) if first is not None else None
        return [fd for fd, _ in poll.poll(None if left_s is None else left_s * 1000 + 1)]

    def let_in(self, made: Callable[[int], None]) -> bool:
        """Ask a client that has connected for a proof. False once the listener is closed."""
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):
                return False
            if error.errno != errno.EAGAIN:
                time.sleep(
                    _BREATH_S
                )  # a client that is gone again, or no descriptor at this moment
            return True
        made(connection.fileno())
        fd, until_s = connection.fileno(), time.monotonic() + self._timeout_s
        try:
            self._unproven[fd] = Unproven(connection, self._token, until_s)
        except OSError:
            self._unmade(fd)
            connection.close()
        if len(self._unproven) > UNPROVEN_MAX:
            self._close(next(iter(self._unproven)))
        return True

    def read(self, fd: int) -> socket.socket | None:
        """Read at one descriptor: the connection, once it is proven."""
        if fd not in self._unproven:  # it was the oldest
            return None
        try:
            self._unproven[fd].read()
        except BlockingIOError:
            return None
        except (OSError, Refused):
            self._close(fd)
            return None
        return self._unproven.pop(fd).connection

    def expire(self) -> None:
        """Close what has had its time."""
        now_s = time.monotonic()
        for fd in [fd for fd, one in self._unproven.items() if one.until_s <= now_s]:
            self._close(fd)

    def close(self) -> None:
        """Close all that is unproven."""
        for fd in list(self._unproven):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._unmade(fd)
        self._unproven.pop(fd).connection.close()


def proven(
    listener: socket.socket,
    token: str,
    *,
    timeout_s: float = frames.PROOF_S,
    made: Callable[[int], None] = lambda fd: None,
    unmade: Callable[[int], None] = lambda fd: None,
) -> Iterator[socket.socket]:
    """Connections to ``listener`` whose clients have shown that they know the token, until it is shut down.

    All handshakes are made on the thread that iterates. The connections are blocking, without a time limit.

    Args:
        timeout_s: time for the whole proof.
        made: told the descriptor of each connection when it is accepted; ``unmade`` before one without a proof is
            closed.
    """
    entrance = _Entrance(listener, token, timeout_s, unmade)
    with suppress(OSError):  # closed already
        listener.setblocking(False)
    try:
        while (at := listener.fileno()) >= 0:
            for fd in entrance.wait():
                if fd == at:
                    if not entrance.let_in(made):
                        return
                elif (connection := entrance.read(fd)) is not None:
                    yield connection
            entrance.expire()
    finally:
        entrance.close()
