"""A Unix socket on a node, each line to which goes on to the runner through the stream of the node's supervisor."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaoskit.process.linux import socket_name
from chaoskit.substrate.supervisor.messages import LineClosed, LineData, LineOpened, Report

LINE_BYTES_MAX = 2**16
_LINES_MAX = 128  # that wait to be let in
_numbers = itertools.count(1)  # of lines, never used again


def receive(line: socket.socket) -> bytes:
    """The next message on a line; empty when it has ended, or what came is no message. Raises BlockingIOError."""
    try:
        data, _, flags, _ = line.recvmsg(LINE_BYTES_MAX, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        raise
    except OSError:
        return b""
    return b"" if flags & socket.MSG_TRUNC else data


class LineDoor:
    """Passes messages on, both ways; they stay whole. A process that does not read what it is told is hung up on.

    Args:
        path: of the socket. tell: the runner. selector: of the supervisor.

    Raises:
        OSError: if there can be no socket at this path.
    """

    def __init__(
        self, path: Path, tell: Callable[[Report], None], selector: selectors.BaseSelector
    ) -> None:
        self._path, self._tell, self._selector = path, tell, selector
        self._lines: dict[int, socket.socket] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a supervisor that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with socket_name(path) as name:
                self._listener.bind(name)
            path.chmod(0o600)
            self._listener.listen(_LINES_MAX)
        except OSError:
            self._listener.close()
            raise
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again, or there is no descriptor for it
            line, _ = self._listener.accept()
            line.setblocking(False)
            number = next(_numbers)
            self._lines[number] = line
            self._selector.register(line, selectors.EVENT_READ, partial(self._pass_on, number))
            self._tell(LineOpened(number))

    def _pass_on(self, number: int) -> None:
        if number not in self._lines:  # it was hung up on in the same turn
            return
        with contextlib.suppress(BlockingIOError):
            if data := receive(self._lines[number]):
                self._tell(LineData(number, data))
            else:
                self._hang_up(number)
                self._tell(LineClosed(number))

    def take(self, message: LineData | LineClosed) -> None:
        """What the runner says on a line."""
        if message.line not in self._lines:
            return
        if isinstance(message, LineClosed):
            self._hang_up(message.line)
            return
        try:
            self._lines[message.line].send(message.data)
        except OSError:
            self._hang_up(message.line)
            self._tell(LineClosed(message.line))

    def _hang_up(self, number: int) -> None:
        line = self._lines.pop(number)
        self._selector.unregister(line)
        line.close()

    def forget(self) -> None:
        """In a child."""
        for one in (self._listener, *self._lines.values()):
            one.close()

    def close(self) -> None:
        """Hang up on all, and tell the runner."""
        for number in list(self._lines):
            self._hang_up(number)
            self._tell(LineClosed(number))
        self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)
