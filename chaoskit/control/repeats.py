"""Tells a bug from bad luck: the same exception on rank after rank, without a step in between, will not go away."""

from __future__ import annotations


class Repeats:
    """Counts exceptions. A pure state machine.

    Args:
        limit: as many failures of one kind without progress end the job; every rank and its replacement.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._step = -1
        self._count = 0
        self._error = ""

    def note(self, error: str, step: int) -> bool:
        """A worker failed with ``error`` when ``step`` steps were committed. True when there is no hope left."""
        if (error, step) != (self._error, self._step):
            self._error, self._step, self._count = error, step, 0
        self._count += 1
        return self._count > self._limit
