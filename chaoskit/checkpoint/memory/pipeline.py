"""Chunks of a copy: made by two threads, in any order, and consumed by one, in order, while they are in the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pipeline:
    """One thread calls :meth:`run` and :meth:`finish`; another one may :meth:`help` meanwhile.

    Args:
        count: of chunks.
        make: makes the chunk of that number; called on both threads, with numbers that ascend.
        consume: called with the numbers from 0 on, each when its chunk is made.
    """

    def __init__(
        self, count: int, make: Callable[[int], None], consume: Callable[[int], None]
    ) -> None:
        self._count, self._make, self._consume = count, make, consume
        self._lock = threading.Lock()
        self._next = self._consumed = 0
        self._busy = 0  # threads that make a chunk
        self._made = bytearray(count)
        self._over = threading.Event()  # all are made, or one could not be
        if not count:
            self._over.set()
        self.error: BaseException | None = None

    def run(
        self, after: Callable[[int], None] = lambda number: None, *, in_turn: bool = True
    ) -> None:
        """Make chunks until none is left to begin, and consume what is there.

        Args:
            after: told the number of each chunk that this thread has made.
            in_turn: consume between chunks, while they are in the cache; else :meth:`finish` does it.
        """
        while (number := self._claim()) is not None:
            self._make_one(number)
            after(number)
            if in_turn and self.error is None:
                self._consume_made()

    def finish(self) -> None:
        """Consume the rest, when all is made. Raises what ``make`` or ``consume`` raised."""
        self._over.wait()
        if self.error is not None:
            raise self.error
        self._consume_made()

    def help(self) -> None:
        """Make chunks too, and return when all are made or one could not be."""
        while (number := self._claim()) is not None:
            self._make_one(number)
        self._over.wait()

    def _claim(self) -> int | None:
        with self._lock:
            if self._next == self._count or self.error is not None:
                return None
            self._busy += 1
            self._next += 1
            return self._next - 1

    def _make_one(self, number: int) -> None:
        error: BaseException | None = None
        try:
            self._make(number)
            self._made[number] = 1
        except BaseException as caught:  # noqa: BLE001 - raised again by finish(), on the thread that waits for all
            error = caught
        with self._lock:
            self._busy -= 1
            self.error = self.error or error
            if not self._busy and (self.error is not None or self._next == self._count):
                self._over.set()

    def _consume_made(self) -> None:
        while self._consumed < self._count and self._made[self._consumed]:
            try:
                self._consume(self._consumed)
            except BaseException as error:
                self._fail(error)
                raise
            self._consumed += 1

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            if not self._busy:
                self._over.set()
