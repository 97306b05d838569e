"""Follows a log while it grows: a file in, complete lines out."""

from __future__ import annotations

import os
import re
from pathlib import Path

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 1 << 16
_ENDS = re.compile(rb"(\r\n|[\r\n])")  # progress bars draw a line over with \r


class Splitter:
    """Makes lines of bytes. A line without an end waits for it: a number that was torn is another number."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` ends, without those that are empty. The middle of an endless line is left out."""
        return [line for line, _ in self.feed_with_ends(data)]

    def feed_with_ends(self, data: bytes) -> list[tuple[str, bool]]:
        """Return the lines that ``data`` ends, each with whether the next line is drawn over it.

        A line that ends with the last byte of ``data`` is one if that is a carriage return; a line feed may follow.
        """
        *parts, self._rest = _ENDS.split(self._rest + data)
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest = self._rest[:_LINE_BYTES_MAX]
        lines_and_ends = zip(parts[::2], parts[1::2], strict=True)
        return [
            (line.decode(errors="replace"), end == b"\r") for line, end in lines_and_ends if line
        ]


class LogFile:
    """A file that grows; it may not be there yet. One that was truncated or replaced is read from its beginning.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._fd, self._at = path, -1, 0

    def read(self, most: int = _CHUNK_BYTES) -> bytes:
        """What was written since the last call, or the first ``most`` bytes of it; b"" where there is nothing new."""
        if self._fd < 0 and not self._open():
            return b""
        data = os.pread(self._fd, most, self._at)
        self._at += len(data)
        return data or self._begin_anew(most)

    def _open(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _begin_anew(self, most: int) -> bytes:
        """Where nothing follows: the file may be a shorter one by now, or another. A line that was torn ends there."""
        mine = os.fstat(self._fd)
        if mine.st_size >= self._at:
            try:
                if os.path.samestat(self.path.stat(), mine):
                    return b""
            except FileNotFoundError:
                return b""  # moved away; the next one is not there yet
            self.close()
            if not self._open():
                return b""
        data = os.pread(self._fd, most, 0)
        self._at = len(data)
        return b"\n" + data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
