"""Tells a bug from bad luck: the same exception on rank after rank, without a step in between, will not go away."""

from __future__ import annotations


class Repeats:
    """Counts exceptions, each worker's once: what is heard twice has not happened twice. A pure state machine.

    Args:
        tolerated: so many failures of one kind without progress; one more ends the job.
    """

    def __init__(self, tolerated: int) -> None:
        self._tolerated = tolerated
        self._step = -1
        self._count = 0
        self._error = ""
        self._heard: set[str] = set()

    def note(self, error: str, step: int, worker: str = "") -> bool:
        """``worker`` failed with ``error`` when ``step`` steps were committed. True when there is no hope left.

        Without a ``worker`` each call counts.
        """
        if (error, step) != (self._error, self._step):
            self._error, self._step, self._count, self._heard = error, step, 0, set()
        if worker in self._heard:
            return False
        self._heard.update([worker] if worker else [])
        self._count += 1
        return self._count > self._tolerated
