"""Duty cycle of a process: the moments at which it is stopped and let go.

-> ``hand/processes/held.py`` stops and lets go.
"""

from __future__ import annotations

import math

#: Part of a period's running time that a correction leaves to the process at least.
_RUNNING_PART_MIN = 0.5


class DutyCycle:
    """Moments for stops that leave a process a share of the time, on the caller's clock.

    Each period begins with a stop. The length of a stop makes up for stops that came late or lasted
    too long before it. All times are in seconds.

    Args:
        share: share of the time in which the process runs, above 0 and below 1.
        period_s: time from a stop to the next.
        now_s: begin of the first period.
    """

    def __init__(self, share: float, period_s: float, now_s: float) -> None:
        self._share, self._period_s = share, period_s
        self._began_s = now_s
        self._period_number = 0
        self._stopped_since_s = math.nan  # while it runs
        self._stopped_s = 0.0
        self.stop_count = 0
        #: The moment of the next stop or, during a stop, of its end.
        self.next_s = now_s

    @property
    def is_stopped(self) -> bool:
        """True during a stop."""
        return not math.isnan(self._stopped_since_s)

    def stop(self, now_s: float) -> None:
        """Note that the process is stopped since ``now_s``, and plan the end of the stop."""
        self._stopped_since_s = now_s
        self.stop_count += 1
        period_end_s = self._began_s + (self._period_number + 1) * self._period_s
        owed_s = (1 - self._share) * (period_end_s - self._began_s) - self._stopped_s
        running_min_s = self._share * self._period_s * _RUNNING_PART_MIN
        length_s = min(owed_s, self._period_s - running_min_s)
        self.next_s = now_s + max(0.0, length_s)

    def let_go(self, now_s: float) -> None:
        """Note that the process runs since ``now_s``, and plan the next stop."""
        self._stopped_s += now_s - self._stopped_since_s
        self._stopped_since_s = math.nan
        running_min_s = self._share * self._period_s * _RUNNING_PART_MIN
        earliest_s = now_s + running_min_s - self._began_s
        self._period_number = max(self._period_number + 1, math.floor(earliest_s / self._period_s))
        begin_s = self._began_s + self._period_number * self._period_s
        self.next_s = max(begin_s, now_s + running_min_s)

    def stopped_s(self, now_s: float) -> float:
        """Return the time for which the process was stopped until ``now_s``."""
        return self._stopped_s + (now_s - self._stopped_since_s if self.is_stopped else 0.0)

    def running_share(self, now_s: float) -> float:
        """Return the share of the time in which the process ran until ``now_s``; 1 at the begin."""
        elapsed_s = now_s - self._began_s
        return 1.0 if elapsed_s <= 0 else 1 - self.stopped_s(now_s) / elapsed_s
