"""Reads the logs of a command's nodes while they grow: bytes in, steps and losses out."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from chaoskit.stacks.patterns import LogPatterns

_CHUNK_BYTES = 1 << 20
_LINE_BYTES_MAX = 1 << 16
_ENDS = re.compile(rb"[\r\n]")  # progress bars draw a line over with \r


@dataclass(frozen=True, slots=True)
class Line:
    """A line that shows a step, a loss, or both. ``t_ns``: when it was read, on the monotonic clock."""

    t_ns: int
    node: str
    step: int | None
    loss: str | None


class Splitter:
    """Makes lines of bytes. A line without an end waits for it: a number that was torn is another number."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` ends, without those that are empty. The middle of an endless line is left out."""
        *lines, self._rest = _ENDS.split(self._rest + data)
        if len(self._rest) > _LINE_BYTES_MAX:
            self._rest = self._rest[:_LINE_BYTES_MAX]
        return [line.decode(errors="replace") for line in lines if line]


class LogReader:
    """What the logs of all nodes show. Pure: it is fed.

    Attributes:
        lines: how many there were, whether they show something or not. steps, losses: how many show one.
        example: the first line that shows no step. odd: the first text that a pattern took for a number.
        highest: step that was shown; None before the first. first_ns: when that was.
    """

    def __init__(self, patterns: LogPatterns) -> None:
        self._patterns = patterns
        self._splitters: dict[str, Splitter] = {}
        self.lines = self.steps = self.losses = 0
        self.example = self.odd = ""
        self.highest: int | None = None
        self.first_ns: int | None = None

    def feed(self, node: str, data: bytes, t_ns: int) -> list[Line]:
        """Take in what a node has written."""
        texts = self._splitters.setdefault(node, Splitter()).feed(data)
        return [line for text in texts if (line := self._read(node, text, t_ns)) is not None]

    def _read(self, node: str, text: str, t_ns: int) -> Line | None:
        self.lines += 1
        found = self._patterns.read(text)
        if found is None or found.step is None:
            self.example = self.example or text
        if found is None:
            return None
        self.odd = self.odd or found.odd
        self.losses += found.loss is not None
        if found.step is not None:
            self.steps += 1
            self.first_ns = self.first_ns or t_ns
            self.highest = found.step if self.highest is None else max(self.highest, found.step)
        return None if found.step is None and found.loss is None else Line(t_ns, node, found.step, found.loss)


class LogFile:
    """A file that grows; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd, self._at = path, -1, 0

    def read(self) -> bytes:
        """What was written since the last call, or a first part of it."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        data = os.pread(self._fd, _CHUNK_BYTES, self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
