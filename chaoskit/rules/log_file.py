"""Reading of a log while it grows: bytes of a file, and the complete lines in them.

-> ``logs/watcher.py``: which log is read, and how often.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 1 << 16
_LINE_ENDS = re.compile(rb"(\r\n|[\r\n])")  # progress bars overwrite a line by \r


class LineSplitter:
    """Splitter of bytes into lines.

    A line without an end waits for it: a number that was torn is another number.
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` ends, without empty ones.

        The middle of an endless line is left out.
        """
        return [line for line, _ in self.feed_with_ends(data)]

    def feed_with_ends(self, data: bytes) -> list[tuple[str, bool]]:
        """Return the lines that ``data`` ends, each with True if the next line overwrites it.

        A line with a carriage return as the last byte of ``data`` counts as overwritten, although a
        line feed may follow.
        """
        *parts, self._unfinished = _LINE_ENDS.split(self._unfinished + data)
        if len(self._unfinished) > _LINE_BYTES_MAX:
            self._unfinished = self._unfinished[:_LINE_BYTES_MAX]
        lines_and_ends = zip(parts[::2], parts[1::2], strict=True)
        return [
            (line.decode(errors="replace"), end == b"\r") for line, end in lines_and_ends if line
        ]


class LogFile:
    """File that grows, and may not exist yet.

    A file that was truncated or replaced is read from its beginning. Its data then follow an added
    newline, which ends a torn line.

    Attributes:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor, self._offset = path, -1, 0

    def read(self, limit_bytes: int = _CHUNK_BYTES) -> bytes:
        """Return the bytes since the last call, at most ``limit_bytes``; b"" if there are none.

        A file that does not exist has none. Raises OSError if it cannot be read.
        """
        if self._descriptor < 0 and not self._open():
            return b""
        data = os.pread(self._descriptor, limit_bytes, self._offset)
        self._offset += len(data)
        return data or self._begin_anew(limit_bytes)

    def _open(self) -> bool:
        """Open the file.

        Return False if it does not exist, and raise OSError for other failures.
        """
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        return True

    def _begin_anew(self, limit_bytes: int) -> bytes:
        """Return the first bytes of a file that was truncated or replaced; b"" if it was not.

        A newline before them ends a torn line.
        """
        status = os.fstat(self._descriptor)
        if status.st_size >= self._offset:
            try:
                if os.path.samestat(self.path.stat(), status):
                    return b""
            except FileNotFoundError:
                return b""  # moved away; its successor does not exist yet
            self.close()
            if not self._open():
                return b""
        data = os.pread(self._descriptor, limit_bytes, 0)
        self._offset = len(data)
        return b"\n" + data

    def close(self) -> None:
        """Close the file; a later read opens it again and goes on where it was."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ArrivedPart(NamedTuple):
    """A part of a log, which arrived at ``t_ns`` on the monotonic clock."""

    data: bytes
    t_ns: int


class ArrivingLog(Protocol):
    """A log that grows, and knows when its parts arrived."""

    def read(self) -> Sequence[ArrivedPart]:
        """Return the parts since the last call, in their order; empty if there are none.

        The size of an answer is limited.
        """

    def close(self) -> None:
        """End the reading."""


class ArrivingFile:
    """The log in a file. A part counts as arrived when it is read."""

    def __init__(self, path: Path) -> None:
        self._file = LogFile(path)

    def read(self) -> Sequence[ArrivedPart]:
        data = self._file.read()
        return [ArrivedPart(data, time.monotonic_ns())] if data else []

    def close(self) -> None:
        self._file.close()
