"""Echo of a run's log files on the supervisor's standard output, for ``kubectl logs``."""

from __future__ import annotations

import os
import select
from pathlib import PurePath

#: A writable pipe accepts this many bytes without blocking (PIPE_BUF).
_WRITE_BYTES = 4096


class LogEcho:
    """Printer of log lines, each prefixed with the name of the process that wrote it.

    Lines are dropped while the output accepts none: the supervisor does not wait for the reader. A
    line reports how many. Lines are cut after 4 KiB.

    Args:
        output: descriptor that the lines are written to.
    """

    def __init__(self, output: int) -> None:
        self._output = output
        self._unfinished: dict[str, bytes] = {}  # file -> unfinished line
        self._left_out_lines = 0

    def take(self, name: str, data: bytes) -> None:
        """Print the lines that end in a further chunk of a file."""
        *lines, unfinished = (self._unfinished.get(name, b"") + data).split(b"\n")
        if len(unfinished) >= _WRITE_BYTES:
            lines, unfinished = [*lines, unfinished], b""
        self._unfinished[name] = unfinished
        for line in lines:
            self._print(name, line)

    def finish(self) -> None:
        """Print the remaining unfinished lines."""
        for name, unfinished in self._unfinished.items():
            if unfinished:
                self._print(name, unfinished)
        self._unfinished.clear()

    def _print(self, name: str, line: bytes) -> None:
        """Print a line or count it as left out. Report left-out lines before the next one."""
        if self._left_out_lines and self._write(
            b"[chaoskit] %d lines were left out" % self._left_out_lines
        ):
            self._left_out_lines = 0
        if self._left_out_lines or not self._write(f"[{PurePath(name).stem}] ".encode() + line):
            self._left_out_lines += 1

    def _write(self, line: bytes) -> bool:
        """Write a line if that does not block. Return whether it was written."""
        writable = select.poll()
        writable.register(self._output, select.POLLOUT)
        if not any(events & select.POLLOUT for _, events in writable.poll(0)):
            return False
        try:
            os.write(self._output, line[: _WRITE_BYTES - 1] + b"\n")
        except OSError:  # a lost reader must not end the supervisor
            return False
        return True
