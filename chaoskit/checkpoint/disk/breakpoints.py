"""Breakpoints of the threads that store a state: whoever reaches one stands there until its process is killed.

They wait at :data:`~chaoskit.checkpoint.layout.boundaries.PLACES`, and cost a look at an empty dictionary while none is
set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_PATIENCE_S = 20.0


class Breakpoints:
    """Of one process. Each stops one thread, once: the first that comes by after it was set.

    Args:
        patience_s: a thread that is not killed goes on after this time.
        over: or when this is set.
    """

    def __init__(
        self, patience_s: float = _PATIENCE_S, over: threading.Event | None = None
    ) -> None:
        self._patience_s, self._over = patience_s, over or threading.Event()
        self._set: dict[str, Callable[[str], None]] = {}
        self._lock = threading.Lock()

    def set(self, place: str, stands: Callable[[str], None]) -> None:
        """Stop the next thread that reaches ``place``; it calls ``stands`` with words that say where it stands."""
        with self._lock:
            self._set[place] = stands

    def reach(self, place: str) -> None:
        """A thread is there: a hook for whoever stores something."""
        if not self._set:
            return
        with self._lock:
            stands = self._set.pop(place, None)
        if stands is not None:
            stands(f"thread {threading.get_native_id()} stood at {place!r}")
            self._over.wait(self._patience_s)
