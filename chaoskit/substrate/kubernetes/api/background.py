"""Requests to the API server that no run waits for: labels and annotations of pods, and Events.

-> kubernetes/events.py makes the Events; kubernetes/substrate.py the labels.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from chaoskit.substrate.kubernetes.api.requests import ApiError

_LIMIT = 256  # queued requests: some minutes of a run with many losses
_PAUSE_S = 1.0
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class _Request:
    send: Callable[[], object]
    on_refused: Callable[[ApiError], None]


class BackgroundRequests:
    """A bounded queue of requests, which a thread of its own makes one after the other.

    A request that the server does not answer is repeated, for two minutes at most. A refused
    request is not repeated. No error of a request reaches the caller.

    Args:
        limit: number of requests that may wait; further ones are left out.
        pause_s: seconds between two attempts.

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
        send: Callable[[], object],
        key: Hashable = None,
        on_refused: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        """Queue a request and return at once.

        It is left out if the queue is full, and dropped if the queue is closed.

        Args:
            send: makes the request. It may raise ApiError.
            key: a request with the same key that still waits is replaced, such as older labels of
                the same pod.
            on_refused: called on the thread with the error if the server refuses the request.
        """
        request = _Request(send, on_refused)
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
        """Make the queued requests until the queue is closed. This runs in the thread."""
        while (request := self._next()) is not None:
            until_s = time.monotonic() + _PATIENCE_S
            while not self._is_over(request) and time.monotonic() < until_s:
                if self._pause():
                    return

    def _next(self) -> _Request | None:
        """Wait for a request and return it, or None when the queue is closed and empty."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def _is_over(self, request: _Request) -> bool:
        """Make a request, and return whether it is done with.

        It must be repeated if the server did not answer. Nothing is raised.
        """
        with contextlib.suppress(Exception):  # an error of such a request must not end a run
            try:
                request.send()
            except ApiError as error:
                if not error.is_refusal:
                    return False
                request.on_refused(error)
        return True

    def _pause(self) -> bool:
        """Wait between two attempts, and return True if there is no further one, as it closes."""
        with self._change:
            return self._change.wait_for(lambda: self._is_closing, self._pause_s)
