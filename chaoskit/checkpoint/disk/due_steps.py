"""The steps after which nodes store the state, and the time limit of storing at a job's end.

-> ``daemon/saving.py``: stores the state of these steps, or records that it failed.
-> ``coordinator/schedules/save_schedule.py``: picks steps by time and has them ordered.
-> ``disk/retention.py``: when an upload is due.
"""

from __future__ import annotations

from collections import deque

#: An ordered step lies at least this many steps ahead of the newest step that was reported to the
#: coordinator.
NOTICE_STEPS = 2
#: Limit without progress of storing at the end of a job: a disk may take this long to sync.
LAST_PATIENCE_S = 300.0
_ORDERS_MAX = 4


class DueSteps:
    """The steps whose state is stored: the same on every node.

    Args:
        every_steps: store at the multiples of this; 0 for none. Needs ``by_time`` then.
        by_time: True if further steps may be ordered.
    """

    def __init__(self, every_steps: int, *, by_time: bool) -> None:
        self._every_steps, self._by_time = every_steps, by_time
        self._ordered: deque[int] = deque(maxlen=_ORDERS_MAX)

    def order(self, step: int) -> None:
        """Add ``step`` to the steps whose state is stored. Only the last 4 orders count."""
        self._ordered.append(step)

    def is_due(self, step: int) -> bool:
        """Return True if the state after ``step`` steps is to be stored; never for step 0."""
        periodic = self._every_steps and step % self._every_steps == 0
        return step > 0 and bool(periodic or step in self._ordered)

    def earliest_after(self, step: int) -> int:
        """Return a lower bound of the next stored step after ``step``.

        It holds for later orders, too, if their steps lie :data:`NOTICE_STEPS` or more ahead of
        ``step``.
        """
        bounds = [ordered for ordered in self._ordered if ordered > step]
        if self._every_steps:
            bounds.append((step // self._every_steps + 1) * self._every_steps)
        if self._by_time:
            bounds.append(step + NOTICE_STEPS)
        return min(bounds)


class Patience:
    """A limit on the time in which an amount may fail to grow. A pure state machine.

    Args:
        patience_s: the limit in seconds.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._amount = -1
        self._since_s = 0.0

    def is_over(self, amount: int, now_s: float) -> bool:
        """Return True if the amount has not exceeded its earlier maximum for the limit or longer.

        The first call starts the time. With a limit of 0, each call returns True.
        """
        if amount > self._amount:
            self._amount, self._since_s = amount, now_s
        return now_s >= self._since_s + self._patience_s
