"""Pipeline of a copy: two threads make chunks in any order, and one consumes them in order.

A chunk is consumed while it is in the cache.

-> ``memory/copying.py`` copies with it, and ``memory/stored.py`` reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Pipeline:
    """A run over numbered chunks: each is made once, on either thread, and consumed in order.

    One thread calls :meth:`run` and :meth:`finish`; another may :meth:`help`.

    Args:
        count: number of chunks.
        make: makes the chunk with a number; called on both threads, with ascending numbers.
        consume: called with the numbers from 0 on, each when its chunk is made.

    Attributes:
        error: the first error of ``make`` or ``consume``; None if there is none.
    """

    def __init__(
        self, count: int, make: Callable[[int], None], consume: Callable[[int], None]
    ) -> None:
        self._count, self._make, self._consume = count, make, consume
        self._lock = threading.Lock()
        self._next = self._consumed = 0
        self._threads_making = 0  # number of threads that make a chunk
        self._made = bytearray(count)
        self._ended = threading.Event()  # all chunks are made, or a chunk failed
        if not count:
            self._ended.set()
        self.error: BaseException | None = None

    def run(
        self, after: Callable[[int], None] = lambda number: None, *, in_turn: bool = True
    ) -> None:
        """Make chunks until none is left to begin, and consume those that are made.

        An error of ``consume`` is raised; an error of ``make`` is left to :meth:`finish`.

        Args:
            after: called with the number of each chunk that this thread has made.
            in_turn: consume between chunks, while they are in the cache; otherwise :meth:`finish`
                does it.
        """
        while (number := self._claim()) is not None:
            self._make_chunk(number)
            after(number)
            if in_turn and self.error is None:
                self._consume_made()

    def finish(self) -> None:
        """Wait until all chunks are made, and consume the rest.

        Raise the error of ``make`` or ``consume``.
        """
        self._ended.wait()
        if self.error is not None:
            raise self.error
        self._consume_made()

    def help(self) -> None:
        """Make chunks on this thread, too. Return when all are made or a chunk failed.

        No error is raised: see :attr:`error`.
        """
        while (number := self._claim()) is not None:
            self._make_chunk(number)
        self._ended.wait()

    def _claim(self) -> int | None:
        """Claim the next chunk for this thread and return its number.

        Return None if all chunks are claimed, or a chunk has failed.
        """
        with self._lock:
            if self._next == self._count or self.error is not None:
                return None
            self._threads_making += 1
            self._next += 1
            return self._next - 1

    def _make_chunk(self, number: int) -> None:
        """Make a chunk. Set :attr:`error` if that fails.

        Wake the waiting threads if this was the last chunk, or a chunk has failed.
        """
        error: BaseException | None = None
        try:
            self._make(number)
            self._made[number] = 1
        except BaseException as caught:  # noqa: BLE001 - finish() raises it on the other thread
            error = caught
        with self._lock:
            self._threads_making -= 1
            self.error = self.error or error
            if not self._threads_making and (self.error is not None or self._next == self._count):
                self._ended.set()

    def _consume_made(self) -> None:
        """Consume all chunks that are made and follow the last one without a gap.

        An error is set as :attr:`error`, and raised.
        """
        while self._consumed < self._count and self._made[self._consumed]:
            try:
                self._consume(self._consumed)
            except BaseException as error:
                self._fail(error)
                raise
            self._consumed += 1

    def _fail(self, error: BaseException) -> None:
        """Set :attr:`error` unless it is set already. No chunk is begun after that."""
        with self._lock:
            self.error = self.error or error
            if not self._threads_making:
                self._ended.set()
