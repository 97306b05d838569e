"""A Unix socket on a node, each line to which goes on to the runner through the stream of the node's supervisor."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaoskit.osprocess import socket_name
from chaoskit.substrate.supervisor.messages import LineClosed, LineData, LineOpened, Report

_LINE_BYTES_MAX = 2**16
_LINES_MAX = 128  # that wait to be let in


class Door:
    """Passes messages on, both ways; they stay whole.

    Args:
        path: of the socket. tell: the runner. selector: of the supervisor.
    """

    def __init__(self, path: Path, tell: Callable[[Report], None], selector: selectors.BaseSelector) -> None:
        self._path, self._tell, self._selector = path, tell, selector
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket_name(path) as name:
            self._listener.bind(name)
        path.chmod(0o600)
        self._listener.listen(_LINES_MAX)
        self._lines: dict[int, socket.socket] = {}
        self._count = 0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        self._count += 1
        self._lines[self._count] = line
        self._selector.register(line, selectors.EVENT_READ, partial(self._pass_on, self._count))
        self._tell(LineOpened(self._count))

    def _pass_on(self, number: int) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._lines[number].recv(_LINE_BYTES_MAX)
        if data:
            self._tell(LineData(number, data))
        else:
            self._hang_up(number)
            self._tell(LineClosed(number))

    def take(self, message: LineData | LineClosed) -> None:
        """What the runner says on a line."""
        if message.line not in self._lines:
            return
        if isinstance(message, LineData):
            with contextlib.suppress(OSError):  # its end will be heard
                self._lines[message.line].send(message.data)
        else:
            self._hang_up(message.line)

    def _hang_up(self, number: int) -> None:
        line = self._lines.pop(number)
        self._selector.unregister(line)
        line.close()

    def forget(self) -> None:
        """In a child."""
        for one in (self._listener, *self._lines.values()):
            one.close()

    def close(self) -> None:
        """Hang up on all."""
        for one in (self._listener, *self._lines.values()):
            self._selector.unregister(one)
        self.forget()
        self._path.unlink(missing_ok=True)
