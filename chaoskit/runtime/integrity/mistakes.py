"""Counts of recent mistakes of a worker, or a rank. Pure: time is counted in steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_MEMORY_STEPS = 100  # after as many clean steps a mistake counts as an accident


class Mistakes:
    """Counts mistakes by worker, or by rank.

    A count restarts after ``memory_steps`` clean steps.
    """

    def __init__(self, memory_steps: int = _MEMORY_STEPS) -> None:
        self._memory_steps = memory_steps
        self._counts: dict[Hashable, tuple[int, int]] = {}  # by worker: count, last step

    def add(self, workers: Iterable[Hashable], step: int) -> None:
        """Count a mistake of each of ``workers`` at ``step``."""
        for worker in workers:
            self._counts[worker] = (self.count(worker, step) + 1, step)

    def count(self, worker: Hashable, step: int) -> int:
        """Return the number of mistakes of ``worker`` that still count at ``step``."""
        count, last_step = self._counts.get(worker, (0, step))
        return count if step <= last_step + self._memory_steps else 0
