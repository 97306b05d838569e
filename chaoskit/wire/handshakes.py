"""Server side of handshakes for servers with threads.

Clients without a proof cost no thread, and keep no other client waiting.

-> wire/frames.py: the proof itself, the client's side, and the server's side for asyncio.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from chaoskit.errors import Refused
from chaoskit.wire import frames

#: Most connections of a listener without a proof; one more closes the oldest.
UNPROVEN_MAX = 64
_BREATH_S = 0.02


class Unproven:
    """Connection with a client that has yet to prove that it knows the token.

    Args:
        connection: a new connection; it does not block until the proof has come.
        until_s: time limit of the proof, on the monotonic clock. The caller enforces it.

    Raises:
        OSError: if the connection has ended.
    """

    def __init__(self, connection: socket.socket, token: str, until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self._handshake, self._frame = frames.Handshake(token), frames.ShortFrame()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.send(frames.encode(self._handshake.challenge()))  # fits a new buffer

    def read(self) -> None:
        """Read the available bytes, and answer once they are a proof of the token.

        The connection is blocking when this returns.

        Raises:
            BlockingIOError: if the proof is incomplete.
            OSError: if the connection has ended.
            Refused: if the message is no proof.
        """
        while missing := self._frame.missing:
            data = self.connection.recv(missing)
            if not data:
                raise ConnectionError("connection closed by the other side")
            self._frame.feed(data)
        self.connection.send(frames.encode(self._handshake.accept(frames.decode(self._frame.body))))
        self.connection.setblocking(True)


class _HandshakeLoop:
    """Handshakes of the clients of one listener, all on one thread."""

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
        """Wait until a descriptor is readable, or the time of a connection is over.

        Return the readable descriptors, among them that of the listener.
        """
        poll = select.poll()
        for fd in (self._listener.fileno(), *self._unproven):
            poll.register(fd, select.POLLIN)
        oldest = next(iter(self._unproven.values()), None)
        left_s = max(0.0, oldest.until_s - time.monotonic()) if oldest is not None else None
        return [fd for fd, _ in poll.poll(None if left_s is None else left_s * 1000 + 1)]

    def accept(self, made: Callable[[int], None]) -> bool:
        """Accept a client and ask it for a proof. Return False once the listener is closed.

        Beyond :data:`UNPROVEN_MAX` clients without a proof, the oldest is closed. A client that is
        gone again is ignored.
        """
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):
                return False
            if error.errno != errno.EAGAIN:
                time.sleep(_BREATH_S)  # the client is gone, or no descriptor is free
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
        """Read from the connection of a descriptor, and return it once it is proven, else None.

        A connection with a wrong proof is closed.
        """
        if fd not in self._unproven:  # it was closed as the oldest
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
        """Close the connections that have used up their time."""
        now_s = time.monotonic()
        for fd in [fd for fd, unproven in self._unproven.items() if unproven.until_s <= now_s]:
            self._close(fd)

    def close(self) -> None:
        """Close all connections without a proof."""
        for fd in list(self._unproven):
            self._close(fd)

    def _close(self, fd: int) -> None:
        """Report and close a connection without a proof."""
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
    """Yield connections to ``listener`` with clients that have proved that they know the token.

    The iteration ends when the listener is shut down. All handshakes are made on the thread that
    iterates. The connections are blocking, without a time limit.

    Args:
        listener: listening socket, which does not block from now on.
        token: the run's token.
        timeout_s: seconds for the whole proof.
        made: called with the descriptor of each connection after it is accepted.
        unmade: called with the descriptor of each connection that is closed without a proof, before
            it is closed.
    """
    handshakes = _HandshakeLoop(listener, token, timeout_s, unmade)
    with suppress(OSError):  # closed already
        listener.setblocking(False)
    try:
        while (listener_fd := listener.fileno()) >= 0:
            for fd in handshakes.wait():
                if fd == listener_fd:
                    if not handshakes.accept(made):
                        return
                elif (connection := handshakes.read(fd)) is not None:
                    yield connection
            handshakes.expire()
    finally:
        handshakes.close()
