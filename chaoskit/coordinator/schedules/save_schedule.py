"""When the state of a job is to be stored: at multiples of a number of steps, and at steps that are picked by time.

By time one place picks, ahead of the step, and tells all nodes: each of them stores a part of the same state. What is
being stored when the job ends is waited for as long as it moves.
"""

from __future__ import annotations

import math
from collections import deque

NOTICE_S = 0.25  # an order is on its way, and the newest step that is known is already an old one
NOTICE_STEPS = 2
_REMEMBERED = 4

#: Of what is stored when the job has ended: a disk may take so long to sync what it was given.
LAST_PATIENCE_S = 300.0


class Timetable:
    """Picks a step every ``every_s`` seconds. A pure state machine.

    Args:
        every_s: 0 for never.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s: float | None = None  # when a step was picked, or the first one was seen
        self._picked = self._generation = -1
        self._first, self._newest = (
            (-1, 0.0),
            (-1, 0.0),
        )  # steps since the last pick, and when each was seen

    def saw(self, step: int, generation: int, now_s: float) -> None:
        """Somebody has committed ``step`` steps."""
        if not self._every_s or generation < self._generation:
            return
        if self._last_s is None:
            self._last_s = now_s
        if (
            generation > self._generation
        ):  # what the one before was to store, and had not reached, is picked anew
            if self._newest[0] < self._picked:
                self._last_s = now_s - self._every_s
            self._picked, self._generation = -1, generation
            self._first = self._newest = (step, now_s)
        elif step > self._newest[0]:
            self._newest = (step, now_s)

    def due(self, now_s: float) -> int | None:
        """The step whose state is to be stored, if it is time to say so."""
        if self._last_s is None or now_s < self._last_s + self._every_s:
            return None
        steps, seconds = self._newest[0] - self._first[0], self._newest[1] - self._first[1]
        if not steps:
            return None  # nobody knows how long a step takes, or nothing goes on
        ahead = math.ceil(NOTICE_S * steps / seconds) if seconds else 0
        self._picked = self._newest[0] + NOTICE_STEPS + ahead
        self._last_s, self._first = now_s, self._newest
        return self._picked


def halting_step(committed: int, step_s: float, heard_s: float) -> int:
    """Return the step after which all ranks are to end: the one they are in, or the first that no rank reaches sooner.

    Args:
        committed: the newest step that is known.
        step_s: how long a step takes; 0 if that is not known.
        heard_s: so old may ``committed`` be.
    """
    return committed + 1 + (int((NOTICE_S + heard_s) / step_s) if step_s else 0)


class Patience:
    """How long something that should grow may not be more than it was at most. A pure state machine."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._amount = -1
        self._since_s = 0.0

    def is_over(self, amount: int, now_s: float) -> bool:
        """Whether the amount has not grown for too long."""
        if amount > self._amount:
            self._amount, self._since_s = amount, now_s
        return now_s >= self._since_s + self._patience_s


class Due:
    """The same on every node: which steps are stored.

    Args:
        every_steps: the multiples of it; 0 for none.
        by_time: whether others may be ordered.
    """

    def __init__(self, every_steps: int, *, by_time: bool) -> None:
        self._every_steps, self._by_time = every_steps, by_time
        self._ordered: deque[int] = deque(maxlen=_REMEMBERED)

    def order(self, step: int) -> None:
        """The state after ``step`` steps, too."""
        self._ordered.append(step)

    def at(self, step: int) -> bool:
        """Whether the state after ``step`` steps is to be stored."""
        periodic = self._every_steps and step % self._every_steps == 0
        return step > 0 and bool(periodic or step in self._ordered)

    def after(self, step: int) -> int:
        """No step before this one, and after ``step``, is: also not if it is ordered in good time."""
        found = [one for one in self._ordered if one > step]
        if self._every_steps:
            found.append((step // self._every_steps + 1) * self._every_steps)
        if self._by_time:
            found.append(step + NOTICE_STEPS)
        return min(found)
