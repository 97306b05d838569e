"""Time of a phase in which the agent that watches it did not run, as in a paused machine. Pure.

The clock continues while a virtual machine or a container is paused. A phase that was interrupted
by the pause seems older than it is, and its rank does not hang. The agent was paused with the rank,
which shows in its readings.

-> agent/worker_handle.py reports the time as time without a CPU; coordinator/detectors/hang.py
subtracts it from the age of the phase. wire/lease.py: pauses of a whole coordinator.
"""

from __future__ import annotations

#: A gap between readings of more than this many intervals, and more than a second, is a standstill.
STANDSTILL_INTERVALS = 4
STANDSTILL_NS = 1_000_000_000


class Standstill:
    """Sum of the pauses between readings of one worker's phase.

    Args:
        interval_ms: time between two readings.
    """

    def __init__(self, interval_ms: float) -> None:
        self._limit_ns = max(STANDSTILL_NS, int(STANDSTILL_INTERVALS * interval_ms * 1e6))
        self._read_ns = 0  # 0 before the first reading
        self._since_ns = 0
        self._stood_ns = 0

    def read_ns(self, since_ns: int, now_ns: int) -> int:
        """Take a reading, and return how long the reader was paused during the current phase.

        Args:
            since_ns: when the phase began; another value begins a new sum.

        Returns:
            The sum of the pauses in nanoseconds.
        """
        if since_ns != self._since_ns:
            self._since_ns, self._stood_ns = since_ns, 0
        if self._read_ns and now_ns - self._read_ns > self._limit_ns:
            self._stood_ns += now_ns - max(self._read_ns, since_ns)
        self._read_ns = now_ns
        return self._stood_ns
