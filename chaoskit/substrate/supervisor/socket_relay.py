"""A Unix socket on a node, whose lines are relayed to the runner by the supervisor.

-> ``supervisor/client.py`` relays them on to a socket or a handler of the runner.
"""

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
_LINES_MAX = 128  # that wait to be accepted
_numbers = itertools.count(1)  # numbers of lines are never reused


def receive(line: socket.socket) -> bytes:
    """Return the next message on a line; empty at its end, or if the message is too long.

    Raises BlockingIOError if there is no message yet.
    """
    try:
        data, _, flags, _ = line.recvmsg(LINE_BYTES_MAX, 0, socket.MSG_DONTWAIT)
    except BlockingIOError:
        raise
    except OSError:
        return b""
    return b"" if flags & socket.MSG_TRUNC else data


class LineDoor:
    """Relay of whole messages between processes of the node and the runner.

    A process that does not read its messages is disconnected.

    Args:
        path: path of the socket.
        send: sends a report to the runner.
        selector: selector of the supervisor.

    Raises:
        OSError: if no socket can be created at this path.
    """

    def __init__(
        self, path: Path, send: Callable[[Report], None], selector: selectors.BaseSelector
    ) -> None:
        self._path, self._send, self._selector = path, send, selector
        self._lines: dict[int, socket.socket] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by a supervisor that was killed
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
        """Accept a process, and report its new line to the runner."""
        with contextlib.suppress(OSError):  # gone again, or no descriptor is free
            line, _ = self._listener.accept()
            line.setblocking(False)
            number = next(_numbers)
            self._lines[number] = line
            self._selector.register(line, selectors.EVENT_READ, partial(self._forward, number))
            self._send(LineOpened(number))

    def _forward(self, number: int) -> None:
        """Send the next message of a process, or the end of its line, to the runner."""
        if number not in self._lines:  # closed earlier in the same turn of the selector
            return
        with contextlib.suppress(BlockingIOError):
            if data := receive(self._lines[number]):
                self._send(LineData(number, data))
            else:
                self._close_line(number)
                self._send(LineClosed(number))

    def take(self, message: LineData | LineClosed) -> None:
        """Pass a message of the runner on to the process of its line, or end the line.

        A message on a line that has ended is dropped. A line whose process is gone ends.
        """
        if message.line not in self._lines:
            return
        if isinstance(message, LineClosed):
            self._close_line(message.line)
            return
        try:
            self._lines[message.line].send(message.data)
        except OSError:
            self._close_line(message.line)
            self._send(LineClosed(message.line))

    def _close_line(self, number: int) -> None:
        line = self._lines.pop(number)
        self._selector.unregister(line)
        line.close()

    def forget(self) -> None:
        """Close all sockets in a forked child."""
        for open_socket in (self._listener, *self._lines.values()):
            open_socket.close()

    def close(self) -> None:
        """Close all lines, report that to the runner, and remove the socket."""
        for number in list(self._lines):
            self._close_line(number)
            self._send(LineClosed(number))
        self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)
