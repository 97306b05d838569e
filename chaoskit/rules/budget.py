"""Limits of the CPU time of a pattern for a line, so that endless backtracking harms no process.

-> ``rules/engine.py``: a rule whose pattern is too slow is switched off. ``rules/patterns.py``
(``nests_repeats``): the warning before.
"""

from __future__ import annotations

import re
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

#: Limit for a line of 4096 characters: a thousand times the time of a usual pattern.
LINE_BUDGET_S = 0.1
#: Longer lines are cut.
LINE_CHARS_MAX = 4096


class PatternTooSlow(Exception):
    """A pattern has used up its budget for a line."""


class Budget:
    """Matcher of patterns with a budget of CPU time each; a context manager, of the main thread.

    The matcher looks for signals now and then, so a timer of the kernel can interrupt it. The timer
    counts the CPU time of the process, so a busy machine makes no pattern slow. There is no limit
    outside a ``with``, nor in other threads, which cannot be interrupted.

    Args:
        line_s: CPU time for one pattern on one line, in seconds.
    """

    def __init__(self, line_s: float = LINE_BUDGET_S) -> None:
        self.line_s = line_s
        self._is_matching = False
        self._is_limited = False
        self._previous_handler: Any = None

    def __enter__(self) -> Budget:
        self._is_limited = threading.current_thread() is threading.main_thread()
        if self._is_limited:
            self._previous_handler = signal.signal(signal.SIGVTALRM, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_limited:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, self._previous_handler)

    def match(self, pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
        """Return ``pattern.match(line)``.

        Raises:
            PatternTooSlow: if the match takes too long.
        """
        if not self._is_limited:
            return pattern.match(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, self.line_s)
        try:
            self._is_matching = True
            return pattern.match(line)
        finally:
            self._is_matching = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_matching:  # otherwise the match ended just before the timer
            raise PatternTooSlow


#: Budget without a limit, for a process that does nothing but match.
UNLIMITED = Budget()
