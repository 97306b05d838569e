"""A clock that tests move."""

from __future__ import annotations


class FakeClock:
    """A clock that stands still until it is advanced. Called, it tells the time in nanoseconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_ns = round(now_s * 1e9)

    def __call__(self) -> int:
        return self._now_ns

    @property
    def now_s(self) -> float:
        return self._now_ns / 1e9

    def advance(self, seconds: float) -> None:
        self._now_ns += round(seconds * 1e9)
