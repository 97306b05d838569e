"""Time of a phase in which the agent that watches it did not run, as in a paused machine.

A pure state machine. The clock goes on while a virtual machine or a container is paused. A phase
that was interrupted by the pause is older than the pause, and its rank does not hang. The agent
stood still with the rank, which shows in its readings.
"""

from __future__ import annotations

#: Readings that are further apart than so many intervals, and than a second, show that the reader stood still.
STANDSTILL_INTERVALS = 4
STANDSTILL_NS = 1_000_000_000


class Standstill:
    """Adds up the pauses between readings of one worker's phase.

    Args:
        interval_ms: between two readings.
    """

    def __init__(self, interval_ms: float) -> None:
        self._limit_ns = max(STANDSTILL_NS, int(STANDSTILL_INTERVALS * interval_ms * 1e6))
        self._read_ns = 0  # 0 before the first reading
        self._since_ns = 0
        self._stood_ns = 0

    def read_ns(self, since_ns: int, now_ns: int) -> int:
        """Return how long the reader stood still during the phase that began at ``since_ns``."""
        if since_ns != self._since_ns:
            self._since_ns, self._stood_ns = since_ns, 0
        if self._read_ns and now_ns - self._read_ns > self._limit_ns:
            self._stood_ns += now_ns - max(self._read_ns, since_ns)
        self._read_ns = now_ns
        return self._stood_ns
