"""Reads the logs of a command's nodes while they grow: bytes in, steps and losses out."""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.rules.follow import Splitter
from chaoskit.stacks.patterns import LogPatterns


@dataclass(frozen=True, slots=True)
class Line:
    """A line that shows a step, a loss, or both. ``t_ns``: when it was read, on the monotonic clock."""

    t_ns: int
    node: str
    step: int | None
    loss: str | None


class LogReader:
    """What the logs of all nodes show. Pure: it is fed.

    Attributes:
        lines: how many there were, whether they show something or not. steps, losses: how many show one.
        example: the first line that shows no step. odd: the first text that a pattern took for a number.
        unread: how many lines show the number of a step in a form that cannot be read.
        unread_last: how many of these came after the last line whose step was read.
        drawn: how many lines with a step were drawn over by the next line, as a progress bar does it.
        highest: step that was shown; None before the first.
        first_ns, last_ns: when the first and the last line that shows a step were read; None before the first.
    """

    def __init__(self, patterns: LogPatterns) -> None:
        self._patterns = patterns
        self._splitters: dict[str, Splitter] = {}
        self._last_is_drawn: dict[
            str, bool
        ] = {}  # by node, of a line that ends with all that was read
        self.lines = self.steps = self.losses = self.unread = self.unread_last = self.drawn = 0
        self.example = self.odd = ""
        self.highest: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def feed(self, node: str, data: bytes, t_ns: int) -> list[Line]:
        """Take in what a node has written."""
        if self._last_is_drawn.pop(node, False) and data.startswith(b"\n"):
            self.drawn -= 1  # the carriage return was one half of the end of a line
        lines: list[Line] = []
        shows_step = is_drawn = False
        for text, is_drawn in self._splitters.setdefault(node, Splitter()).feed_with_ends(data):
            line = self._read(node, text, t_ns)
            shows_step = line is not None and line.step is not None
            self.drawn += shows_step and is_drawn
            if line is not None:
                lines.append(line)
        self._last_is_drawn[node] = shows_step and is_drawn and data.endswith(b"\r")
        return lines

    def _read(self, node: str, text: str, t_ns: int) -> Line | None:
        self.lines += 1
        found = self._patterns.read(text)
        if found is None or found.step is None:
            self.example = self.example or text
        if found is None:
            return None
        if found.is_unread and not self.unread:
            self.odd = found.odd  # it tells more than what is no number at all
        self.odd = self.odd or found.odd
        self.unread += found.is_unread
        self.unread_last += found.is_unread
        self.losses += found.loss is not None
        if found.step is not None:
            self.steps += 1
            self.unread_last = 0
            self.first_ns = self.first_ns or t_ns
            self.last_ns = t_ns
            self.highest = found.step if self.highest is None else max(self.highest, found.step)
        return (
            None
            if found.step is None and found.loss is None
            else Line(t_ns, node, found.step, found.loss)
        )
