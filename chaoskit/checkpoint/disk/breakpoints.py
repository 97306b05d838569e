"""Breakpoints in the threads that store a state: a thread stops there until its process is killed.

Threads pass them at :data:`~chaoskit.checkpoint.layout.boundaries.PLACES`. While none is set, a
breakpoint costs a test of an empty dictionary.

-> ``daemon/injection.py``: sets them when a fault orders it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PATIENCE_S = 20.0


class Breakpoints:
    """The breakpoints of a process. Each stops one thread, once: the first that reaches it.

    Args:
        patience_s: time after which a thread that is not killed goes on.
        over: event that releases stopped threads earlier.
    """

    def __init__(
        self, patience_s: float = _PATIENCE_S, over: threading.Event | None = None
    ) -> None:
        self._patience_s, self._released = patience_s, over or threading.Event()
        self._callbacks: dict[str, Callable[[str], None]] = {}
        self._lock = threading.Lock()

    def set(self, place: str, on_reached: Callable[[str], None]) -> None:
        """Stop the next thread that reaches ``place``. A breakpoint that was set there is replaced.

        Args:
            on_reached: called by the stopped thread with a description of its place.
        """
        with self._lock:
            self._callbacks[place] = on_reached

    def reach(self, place: str) -> None:
        """Stop the calling thread if there is a breakpoint at ``place``; used as a ``Hook``.

        The breakpoint is removed and its callback called. The thread goes on when the event
        ``over`` is set, or after ``patience_s``.
        """
        if not self._callbacks:
            return
        with self._lock:
            on_reached = self._callbacks.pop(place, None)
        if on_reached is not None:
            on_reached(f"thread {threading.get_native_id()} stood at {place!r}")
            self._released.wait(self._patience_s)
