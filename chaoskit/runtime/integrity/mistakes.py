"""How often a worker, or a rank, was wrong lately. Pure: time is counted in steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_MEMORY_STEPS = 100  # after as many clean steps a mistake was an accident


class Mistakes:
    """Counts mistakes by worker, or by rank; one that makes none for ``memory_steps`` steps begins anew."""

    def __init__(self, memory_steps: int = _MEMORY_STEPS) -> None:
        self._memory_steps = memory_steps
        self._found: dict[
            Hashable, tuple[int, int]
        ] = {}  # worker -> how many, and the step of the last one

    def add(self, workers: Iterable[Hashable], step: int) -> None:
        """Each of ``workers`` was wrong at ``step``."""
        for worker in workers:
            self._found[worker] = (self.count(worker, step) + 1, step)

    def count(self, worker: Hashable, step: int) -> int:
        """The mistakes of ``worker`` that still count at ``step``."""
        count, last_step = self._found.get(worker, (0, step))
        return count if step <= last_step + self._memory_steps else 0
