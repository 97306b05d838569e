"""Requests to the API server that no run waits for: labels and annotations of pods, and Events."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from chaoskit.substrate.kubernetes.api.requests import ApiError

_LIMIT = 256  # requests that wait: some minutes of a run in which much is lost
_PAUSE_S = 1.0
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Request:
    act: Callable[[], object]
    refused: Callable[[ApiError], None]


class BackgroundRequests:
    """A bounded queue of requests, which a thread of its own makes one after the other.

    A request that the server does not answer is made again, for two minutes at most. One that the server refuses is
    not. Nothing that a request raises reaches the caller.

    Args:
        limit: number of requests that may wait; further ones are left out.
        pause_s: time between two attempts.

    Attributes:
        left_out: number of requests that were left out.
    """

    def __init__(self, limit: int = _LIMIT, pause_s: float = _PAUSE_S) -> None:
        self._limit, self._pause_s = limit, pause_s
        self._waiting: OrderedDict[Hashable, _Request] = OrderedDict()
        self._change = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.left_out = 0

    def submit(
        self,
        act: Callable[[], object],
        key: Hashable = None,
        refused: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        """Have a request made, and return at once.

        Args:
            act: makes the request. It may raise ApiError.
            key: a request with the same key that still waits is replaced, such as older labels of the same pod.
            refused: is called on the thread with the answer of a server that refuses the request.
        """
        request = _Request(act, refused)
        with self._change:
            if self._is_closing:
                return
            key = object() if key is None else key
            if key not in self._waiting and len(self._waiting) >= self._limit:
                self.left_out += 1
                return
            self._waiting[key] = request
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ck-background", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def close(self, limit_s: float) -> None:
        """Accept no further requests, and make the queued ones until one is not answered.

        Requests that are still queued after ``limit_s`` seconds are dropped.
        """
        with self._change:
            self._is_closing = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(limit_s)
        with self._change:
            self._waiting.clear()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            until_s = time.monotonic() + _PATIENCE_S
            while not self._is_over(request) and time.monotonic() < until_s:
                if self._pause():
                    return

    def _next(self) -> _Request | None:
        """Wait for a request; None when the queue is closed and empty."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def _is_over(self, request: _Request) -> bool:
        """Make a request. Return False if the server did not answer, so that it is to be made again."""
        with contextlib.suppress(Exception):  # a request that no run waits for must not cost a run
            try:
                request.act()
            except ApiError as error:
                if not error.is_refusal:
                    return False
                request.refused(error)
        return True

    def _pause(self) -> bool:
        """Wait between two attempts. Return whether the queue is closing, so that there is no further one."""
        with self._change:
            return self._change.wait_for(lambda: self._is_closing, self._pause_s)
