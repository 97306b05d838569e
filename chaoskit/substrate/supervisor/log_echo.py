"""Echo of a run's log files on the supervisor's standard output, for ``kubectl logs``."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Sequence
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
        self._print(name, lines)

    def finish(self) -> None:
        """Print the remaining unfinished lines."""
        for name, unfinished in self._unfinished.items():
            if unfinished:
                self._print(name, [unfinished])
        self._unfinished.clear()

    def _print(self, name: str, lines: Iterable[bytes]) -> None:
        """Print lines in blocks that one write accepts: a write for each line takes too long."""
        prefix = f"[{PurePath(name).stem}] ".encode()
        block = list[bytes]()
        size_bytes = 0
        for line in lines:
            printed = (prefix + line)[: _WRITE_BYTES - 1] + b"\n"
            if size_bytes + len(printed) > _WRITE_BYTES:
                self._print_block(block)
                block, size_bytes = [], 0
            block.append(printed)
            size_bytes += len(printed)
        if block:
            self._print_block(block)

    def _print_block(self, lines: Sequence[bytes]) -> None:
        """Print whole lines or count them as left out. Report left-out lines before the next one."""
        if self._left_out_lines and self._write(
            b"[chaoskit] %d lines were left out\n" % self._left_out_lines
        ):
            self._left_out_lines = 0
        if self._left_out_lines or not self._write(b"".join(lines)):
            self._left_out_lines += len(lines)

    def _write(self, block: bytes) -> bool:
        """Write at most 4 KiB if that does not block. Return whether they were written."""
        writable = select.poll()
        writable.register(self._output, select.POLLOUT)
        if not any(events & select.POLLOUT for _, events in writable.poll(0)):
            return False
        try:
            os.write(self._output, block)
        except OSError:  # a lost reader must not end the supervisor
            return False
        return True
