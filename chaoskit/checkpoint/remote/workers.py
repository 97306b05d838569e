"""A pool of threads for requests to a store.

They are daemons, so a thread that hangs in a dead file system delays no exit.

-> ``remote/store.py``: one pool for requests. ``remote/upload.py``: another one for files.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """A pool of at most ``threads_max`` threads, which start when they are needed.

    Tasks are begun in the order of their submission.

    Args:
        threads_max: largest number of threads.
        name: name of each thread.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max, self._name = threads_max, name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread_count = 0
        self._closed = False

    def submit(self, act: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run ``act`` when a thread is free. Return the future of its result.

        After :meth:`close` the future is cancelled at once.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            self._tasks.put((future, lambda: act(*arguments)))
            if self._thread_count < self._threads_max:
                self._thread_count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def close(self) -> None:
        """Start no further task: those that wait are cancelled. Tasks under way run on."""
        with self._lock:
            self._closed = True
            for _ in range(self._thread_count):
                self._tasks.put(None)

    def _work(self) -> None:
        """Run tasks until the end of the pool."""
        while (task := self._tasks.get()) is not None:
            future, act = task
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
                future.set_exception(error)


def finish(futures: Sequence[Future[Any]]) -> None:
    """Cancel the tasks that have not begun, and wait for the others to end."""
    for future in futures:
        future.cancel()
    wait(futures)
