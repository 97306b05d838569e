"""A clock that a test moves, for classes that take their clock as an argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Measured:
    """The time of a fake clock that has passed in a block."""

    duration_s: float = 0.0


class FakeClock:
    """A clock that stands still except in :meth:`sleep`, which returns at once."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def now_ns(self) -> int:
        return round(self._now_s * 1e9)

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s

    @contextmanager
    def measured(self) -> Iterator[Measured]:
        """Measure the block."""
        begun_s, measured = self._now_s, Measured()
        yield measured
        measured.duration_s = self._now_s - begun_s
