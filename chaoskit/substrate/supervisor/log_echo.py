"""Log files of a run on the standard output of a supervisor, which is what ``kubectl logs`` shows of its container."""

from __future__ import annotations

import os
import select
from pathlib import PurePath

#: A pipe that can be written takes so many bytes without blocking (PIPE_BUF).
_WRITE_BYTES = 4096


class LogEcho:
    """Prints the lines of log files, each behind the name of the process that wrote it.

    Lines are left out while the output takes none: the supervisor does not wait for the reader.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._begun: dict[str, bytes] = {}  # file -> a line that has not ended
        self._left_out = 0  # lines

    def take(self, name: str, data: bytes) -> None:
        """Print the lines that end in a further piece of a file."""
        *lines, begun = (self._begun.get(name, b"") + data).split(b"\n")
        if len(begun) >= _WRITE_BYTES:
            lines, begun = [*lines, begun], b""
        self._begun[name] = begun
        for line in lines:
            self._print(name, line)

    def finish(self) -> None:
        """Print lines that will not be ended."""
        for name, begun in self._begun.items():
            if begun:
                self._print(name, begun)
        self._begun.clear()

    def _print(self, name: str, line: bytes) -> None:
        if self._left_out and self._write(b"[chaoskit] %d lines were left out" % self._left_out):
            self._left_out = 0
        if self._left_out or not self._write(f"[{PurePath(name).stem}] ".encode() + line):
            self._left_out += 1

    def _write(self, line: bytes) -> bool:
        """Write a line, if that does not block. Return whether it was written."""
        writable = select.poll()
        writable.register(self._output, select.POLLOUT)
        if not any(events & select.POLLOUT for _, events in writable.poll(0)):
            return False
        try:
            os.write(self._output, line[: _WRITE_BYTES - 1] + b"\n")
        except OSError:  # the reader has gone: nothing here may end the supervisor
            return False
        return True
