"""Threads for requests. They are daemons: one that hangs in a dead file system must not hold up an exit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """At most ``most`` things at a time, in the order in which they came. Threads begin when they are needed."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads = 0
        self._closed = False

    def submit(self, act: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Do it when a thread is free. After :meth:`close` it is cancelled at once."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._todo.put((future, lambda: act(*arguments)))
            if self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Begin nothing any more. Does not wait for what is under way."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._todo.put(None)

    def _work(self) -> None:
        while (task := self._todo.get()) is not None:
            future, act = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the result
                future.set_exception(error)


def finish(futures: Sequence[Future[Any]]) -> None:
    """Cancel what has not begun, and wait for the rest: nothing of it is under way any more."""
    for future in futures:
        future.cancel()
    wait(futures)
