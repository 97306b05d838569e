"""Processes that are held: all their threads are stopped by ptrace.

The kernel lets them go on when this process ends, however it ends. Signals that arrive meanwhile
are delivered afterwards.

-> ``hand/processes/held.py`` makes effects of it.
"""

from __future__ import annotations

import contextlib
import os
import time

from ..refusals import ProcessGone
from . import access, proc, ptrace

_POLL_S = 0.0002


class HeldProcess:
    """A process whose threads are stopped, or are about to stop.

    Attributes:
        signals: the threads that are stopped, and the signal that each of them gets afterwards.
        pending: the threads that have yet to stop.
    """

    def __init__(self, pid: int, ticks: int) -> None:
        self.pid, self.ticks = pid, ticks
        self.signals: dict[int, int] = {}
        self.pending: set[int] = set()

    @property
    def is_gone(self) -> bool:
        """True if all threads have ended."""
        return not self.signals and not self.pending


class Tracer:
    """All processes that this process holds. It is used by one thread only."""

    def __init__(self) -> None:
        self._held: dict[int, HeldProcess] = {}

    def hold(self, pid: int, ticks: int, within_s: float) -> HeldProcess:
        """Stop all threads of a process, also those that appear meanwhile.

        A thread in an uninterruptible call stops when the call returns. Threads that have not
        stopped within ``within_s`` seconds are pending.

        Raises:
            ProcessGone: if the process has ended, or ``pid`` is another one.
            Unable: if the kernel does not allow it; nothing is stopped then.
        """
        if proc.same_process(pid, ticks) is None:
            raise ProcessGone(pid, ticks)
        held = self._held[pid] = HeldProcess(pid, ticks)
        try:
            self._seize(held, pid)
            if proc.same_process(pid, ticks) is None:  # another process had the pid meanwhile
                raise ProcessGone(pid, ticks)
            self._stop_all(held, within_s)
        except BaseException:
            self.let_go(held)
            raise
        if held.is_gone:
            self.let_go(held)
            raise ProcessGone(pid, ticks)
        return held

    def let_go(self, held: HeldProcess) -> None:
        """Let a process go on. A thread that is still pending is let go as soon as it stops."""
        self.collect()
        self._held.pop(held.pid, None)
        for tid, signum in held.signals.items():
            with contextlib.suppress(ProcessLookupError):
                ptrace.detach(tid, signum)

    def collect(self) -> None:
        """Take in all stops and ends of threads that the kernel has reported."""
        with contextlib.suppress(ChildProcessError):  # no thread is traced
            while True:
                tid, status = os.waitpid(-1, os.WNOHANG | ptrace.WAIT_ALL)
                if tid == 0:
                    return
                self._take(tid, status)

    def settle(self, held: HeldProcess) -> None:
        """Wait until the stopped threads have left their CPUs, so that their counters are final."""
        for tid in held.signals:
            with contextlib.suppress(ProcessLookupError):
                ptrace.settle(tid)

    def _stop_all(self, held: HeldProcess, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while True:
            threads = set(proc.thread_ids(held.pid)) - held.signals.keys() - held.pending
            for tid in threads:
                self._seize(held, tid)
            self.collect()
            if (not threads and not held.pending) or time.monotonic() > deadline_s:
                return
            if not threads:
                time.sleep(_POLL_S)

    def _seize(self, held: HeldProcess, tid: int) -> None:
        try:
            ptrace.seize(tid, ptrace.TRACE_CLONE)
            held.pending.add(tid)
            ptrace.interrupt(tid)
        except ProcessLookupError:
            held.pending.discard(tid)
        except PermissionError:
            self._check_refusal(held, tid)

    def _check_refusal(self, held: HeldProcess, tid: int) -> None:
        """Raise Unable, unless the thread has ended, or this process traces it already.

        It does if the thread is new, or was pending when its process was let go.
        """
        thread, owner = proc.read_stat(held.pid, tid), proc.credentials(tid)
        if thread is None or owner is None or thread.has_ended or thread.is_exiting:
            return
        if owner.tracer == os.getpid():
            if tid not in held.signals:
                held.pending.add(tid)
            return
        raise access.ptrace_refusal(tid)

    def _take(self, tid: int, status: int) -> None:
        held = self._holder(tid)
        if not os.WIFSTOPPED(status):
            if held is not None:
                held.pending.discard(tid)
                held.signals.pop(tid, None)
            return
        is_before_signal = ptrace.event_of(status) == 0
        signum = os.WSTOPSIG(status) if is_before_signal else 0
        if held is None:
            with contextlib.suppress(ProcessLookupError):
                ptrace.detach(tid, signum)
            return
        held.pending.discard(tid)
        held.signals[tid] = signum

    def _holder(self, tid: int) -> HeldProcess | None:
        """Return the held process that a thread belongs to, also a thread that is new."""
        for held in self._held.values():
            if tid in held.signals or tid in held.pending:
                return held
        pid = proc.process_of(tid)
        return None if pid is None else self._held.get(pid)
