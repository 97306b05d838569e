"""How much CPU time a pattern may take for one line: one that backtracks without end must harm nobody."""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

#: What no honest pattern needs for a line of 4096 characters: a thousand times what a usual one takes.
LINE_BUDGET_S = 0.1
#: Longer lines are cut.
LINE_CHARS_MAX = 4096


class TooSlow(Exception):
    """A pattern has used up its budget for a line."""


class Budget:
    """Matches patterns, each within its budget of CPU time; a context manager, of the main thread.

    The matcher looks for signals now and then, so a timer of the kernel can interrupt it. It counts what the process
    itself computes: a busy machine makes no pattern slow. In another thread nobody can interrupt it, and there is no
    limit.

    Args:
        line_s: for one pattern on one line.
    """

    def __init__(self, line_s: float = LINE_BUDGET_S) -> None:
        self.line_s = line_s
        self._matches = False
        self._limited = False
        self._before: Any = None

    def __enter__(self) -> Budget:
        self._limited = threading.current_thread() is threading.main_thread()
        if self._limited:
            self._before = signal.signal(signal.SIGVTALRM, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._limited:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._before)

    def match(self, pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
        """As ``pattern.match(line)``.

        Raises:
            TooSlow: if that takes too long.
        """
        if not self._limited:
            return pattern.match(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, self.line_s)
        try:
            self._matches = True
            return pattern.match(line)
        finally:
            self._matches = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._matches:  # else it went off right after the match that it was set for
            raise TooSlow


#: Of whoever can do without, as it matches in a process of its own.
UNLIMITED = Budget()
