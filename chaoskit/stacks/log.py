"""Reader of the logs of a command's nodes while they grow, from bytes to steps and losses.

-> ``stacks/patterns.py``: how a line is matched. ``experiment/injection/command_follower.py`` feeds
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaoskit.rules.log_file import LineSplitter
from chaoskit.stacks.patterns import LogPatterns


@dataclass(frozen=True, slots=True)
class CommandLogLine:
    """A line that shows a step, a loss, or both.

    Attributes:
        t_ns: the time at which it arrived, on the monotonic clock.
        step: None if the line shows none.
        loss: the loss as it was printed; None if the line shows none.
        late_ns: the time from its arrival until the harness read it.
    """

    t_ns: int
    node: str
    step: int | None
    loss: str | None
    late_ns: int = 0

    @property
    def read_ns(self) -> int:
        """The time at which the harness read it."""
        return self.t_ns + self.late_ns


class LogReader:
    """The content of the logs of all nodes. Pure: the caller feeds it.

    Attributes:
        lines: the number of lines.
        steps, losses: the number of lines that show a step, or a loss.
        example: the first line that shows no step; "" if there is none.
        odd: the first text that a pattern matched and that is no number; "" if there is none.
        unread: the number of lines with a step in a form that cannot be read.
        unread_last: the number of such lines after the last line with a readable step.
        drawn: the number of lines with a step that were overwritten by the next line, as by a
            progress bar.
        highest: the highest step; None before the first.
        first_ns, last_ns: the time at which the first and the last line with a step arrived; None
            before the first.
    """

    def __init__(self, patterns: LogPatterns) -> None:
        self._patterns = patterns
        self._splitters: dict[str, LineSplitter] = {}
        # node -> the last line read so far was a step that ends with a carriage return
        self._last_is_drawn: dict[str, bool] = {}
        self.lines = self.steps = self.losses = self.unread = self.unread_last = self.drawn = 0
        self.example = self.odd = ""
        self.highest: int | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None

    def feed(self, node: str, data: bytes, t_ns: int) -> list[CommandLogLine]:
        """Read output of a node, update the counts, and return its lines with a step or a loss.

        Args:
            t_ns: the time at which the output arrived.
        """
        if self._last_is_drawn.pop(node, False) and data.startswith(b"\n"):
            self.drawn -= 1  # the carriage return was half of a line end
        lines: list[CommandLogLine] = []
        shows_step = is_drawn = False
        for text, is_drawn in self._splitters.setdefault(node, LineSplitter()).feed_with_ends(data):
            line = self._read(node, text, t_ns)
            shows_step = line is not None and line.step is not None
            self.drawn += shows_step and is_drawn
            if line is not None:
                lines.append(line)
        self._last_is_drawn[node] = shows_step and is_drawn and data.endswith(b"\r")
        return lines

    def _read(self, node: str, text: str, t_ns: int) -> CommandLogLine | None:
        """Count a line and return the step and loss that it shows, or None."""
        self.lines += 1
        shown = self._patterns.read(text)
        if shown is None or shown.step is None:
            self.example = self.example or text
        if shown is None:
            return None
        if shown.is_unread and not self.unread:
            self.odd = shown.odd  # an unreadable number says more than a text without a number
        self.odd = self.odd or shown.odd
        self.unread += shown.is_unread
        self.unread_last += shown.is_unread
        self.losses += shown.loss is not None
        if shown.step is not None:
            self.steps += 1
            self.unread_last = 0
            self.first_ns = self.first_ns or t_ns
            self.last_ns = max(self.last_ns or 0, t_ns)  # logs of several nodes are read in turn
            self.highest = shown.step if self.highest is None else max(self.highest, shown.step)
        return (
            None
            if shown.step is None and shown.loss is None
            else CommandLogLine(t_ns, node, shown.step, shown.loss)
        )
