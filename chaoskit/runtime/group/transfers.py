"""Waiting for gloo without being held by it.

When a connection ends, gloo tells the waiters of operations that it has queued, but forgets the one that it was in the
middle of (its partly written send, its partly read receive): whoever waits for that one sits there until the collective
timeout. So the training thread never waits inside gloo. A thread of the group does, in the order in which operations
were started; the training thread waits for *it*, on a condition that an abort can break. The thread that is left behind
ends with the backend's own timeout. Until then nobody may free the group: to free gloo is to wait for its operations,
and the garbage collector would do that in whatever thread it runs.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from chaoskit.runtime.group.collective import GroupFailed


class GroupAborted(GroupFailed):
    """The group was left while an operation was under way."""


class Transfer:
    """One operation of a group."""

    __slots__ = ("_error", "_line", "done")

    def __init__(self, line: WaitingLine) -> None:
        self._line = line
        self._error: BaseException | None = None
        self.done = False

    def wait(self) -> None:
        """Return when the operation is complete.

        Raises:
            GroupAborted: if the group was left. RuntimeError: the backend's own error.
        """
        if not self.done:
            self._line.wait_for(self)
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        """Called by the line."""
        self._error, self.done = error, True


class WaitingLine:
    """The thread that waits inside the backend, and the condition on which everybody else does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Transfer] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def add(self, work: Any) -> Transfer:
        """Wait for ``work`` after all that was added before."""
        transfer = Transfer(self)
        self._queue.put((work, transfer))
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Block until ``transfer`` is done, or raise GroupAborted."""
        with self._changed:
            self._changed.wait_for(lambda: transfer.done or self._aborted)
        if not transfer.done:
            raise GroupAborted("the process group was left")

    def abort(self) -> None:
        """Free everybody who waits. What is under way is given up."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._queue.put(None)

    def join(self) -> None:
        """After an abort: return when the backend is done with all that was started before, at its timeout at worst."""
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, transfer = item
            error: BaseException | None = None
            try:
                work.wait()
            except RuntimeError as failed:
                error = failed
            with self._changed:
                transfer.finish(error)
                self._changed.notify_all()
            del item, work, transfer  # an idle thread must not keep the last operation's memory
