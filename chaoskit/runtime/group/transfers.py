"""Interruptible waits for gloo operations.

When a connection ends, gloo notifies the waiters of queued operations, but forgets the operation in
progress (a partly written send, a partly read receive). A waiter of that operation would block
until the collective timeout. The training thread therefore never waits inside gloo. A thread of the
group does, in the order in which operations were started. The training thread waits for that thread
on a condition that an abort can break.

The thread that is left behind ends with the backend's own timeout. The group must not be freed
before: freeing gloo waits for its operations, and the garbage collector would do that in an
arbitrary thread.

-> group/process_group.py: the connections that an abort shuts down. group/regroup.py frees groups.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

from chaoskit.runtime.group.collective import GroupFailed


class GroupAborted(GroupFailed):
    """The error of a wait or a call after the group was left."""


class Transfer:
    """An operation of a group that a thread can wait for."""

    __slots__ = ("_error", "_waiter", "done")

    def __init__(self, waiter: TransferThread) -> None:
        self._waiter = waiter
        self._error: BaseException | None = None
        self.done = False

    def wait(self) -> None:
        """Return when the operation is complete.

        Raises:
            GroupAborted: if the group was left.
            RuntimeError: the backend's own error.
        """
        if not self.done:
            self._waiter.wait_for(self)
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        """Mark the operation as complete, or as failed with ``error``. Called by the thread."""
        self._error, self.done = error, True


class TransferThread:
    """The thread that waits inside the backend, and a condition for all other threads."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Any, Transfer] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def add(self, work: Any) -> Transfer:
        """Return the transfer of ``work``, which the thread now waits for.

        The thread waits for operations in the order in which they were added.
        """
        transfer = Transfer(self)
        self._queue.put((work, transfer))
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Block until ``transfer`` is done. Raise GroupAborted if the group is left first."""
        with self._changed:
            self._changed.wait_for(lambda: transfer.done or self._aborted)
        if not transfer.done:
            raise GroupAborted("the process group was left")

    def abort(self) -> None:
        """Make waits for unfinished operations raise GroupAborted, and have the thread end.

        The thread first waits for the operations that were added.
        """
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._queue.put(None)

    def join(self) -> None:
        """Return when the backend is done with all operations, at its timeout at the latest.

        Call it after :meth:`abort`.
        """
        self._thread.join()

    def _run(self) -> None:
        """Wait for the operations in turn, and mark each as complete, until the group is left."""
        while (queued := self._queue.get()) is not None:
            work, transfer = queued
            error: BaseException | None = None
            try:
                work.wait()
            except RuntimeError as failed:
                error = failed
            with self._changed:
                transfer.finish(error)
                self._changed.notify_all()
            del queued, work, transfer  # an idle thread must not keep the last operation's memory
