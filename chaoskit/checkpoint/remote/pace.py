"""How fast bytes may go: a schedule on which every piece reserves its time. Pure."""

from __future__ import annotations


class Pace:
    """Spreads bytes evenly over time, at most ``bytes_per_s`` of them; 0: no limit. Not for several threads at once."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, size_bytes: int, now_s: float) -> float:
        """How long a piece that is ready at ``now_s`` has to wait; it has its place on the schedule then."""
        if not self._bytes_per_s:
            return 0.0
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + size_bytes / self._bytes_per_s
        return begin_s - now_s
