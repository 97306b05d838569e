"""Processes of a node, and the kernel that runs them: of this host, or of the node's machine.

-> ``process/linux.py``: what is read from /proc. ``supervisor/remote_node.py``: the kernel of a
node that is reached only through its supervisor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from chaoskit.process import linux
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.core.launched_ranks import LaunchedRank, own_ranks
from chaoskit.substrate.undo import ContinueEntry, UndoEntry


class Thread(NamedTuple):
    """A thread as the kernel shows it.

    Attributes:
        state: one letter: R, S, D, T (stopped) and others.
        cpu_ticks: CPU time in clock ticks.
        switches: number of context switches; constant while the thread sleeps.
    """

    name: str
    state: str
    cpu_ticks: int
    switches: int


class Kernel(Protocol):
    """The kernel that runs the processes of a node.

    It identifies a process by pid and start time in clock ticks. All methods but
    :meth:`undo_stop` raise HarnessError if a remote node does not answer.
    """

    def find(self, pid: int) -> Process:
        """Return the process that has this pid now; its ``ticks`` are None if there is none."""

    def tree(self, root: Process) -> list[Process]:
        """Return a process and its descendants, without those that are ending.

        The list is empty if the process is gone.
        """

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal. Raises ProcessLookupError if the process is gone."""

    def is_gone(self, process: Process) -> bool:
        """Return whether a process has ended or runs none of its own code any more."""

    def is_stopped(self, process: Process) -> bool:
        """Return whether a process is stopped by a signal; False if it is gone."""

    def threads(self, process: Process) -> dict[int, Thread]:
        """Return the threads of a process by thread id; empty if the process is gone."""

    def launched_ranks(self, root: Process) -> dict[Process, LaunchedRank]:
        """Return the descendants of a process that were started with a rank, and their ranks.

        Processes that inherited the variable of a rank, such as data loaders, are left out, as are
        those that are ending. It is empty if the process is gone.
        """

    def exit_status(self, process: Process) -> int | None:
        """Return the wait status of a process that has ended and was not reaped, else None."""

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        """Return the TCP error counters of a process's network namespace.

        They are 0 if the process is gone.
        """

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        """Return undo entries that continue a stopped process if the runner is killed.

        There are none where another component continues it.
        """


class HostKernel:
    """The kernel of this host, as this process sees it."""

    def find(self, pid: int) -> Process:
        return Process(pid, linux.start_ticks(pid), linux.process_name(pid), self)

    def tree(self, root: Process) -> list[Process]:
        if root.ticks is None or linux.start_ticks(root.pid) != root.ticks:
            return []
        descendants = linux.descendants(root.pid)
        return [self.find(pid) for pid in (root.pid, *descendants) if not linux.is_ending(pid)]

    def signal(self, process: Process, signum: int) -> None:
        gone_message = f"{process.name} (pid {process.pid}) is gone"
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            raise ProcessLookupError(gone_message) from None
        try:
            if self.is_gone(process):
                raise ProcessLookupError(gone_message)
            signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)

    def is_gone(self, process: Process) -> bool:
        return linux.start_ticks(process.pid) != process.ticks or linux.is_ending(process.pid)

    def is_stopped(self, process: Process) -> bool:
        return linux.is_stopped(process.pid, process.ticks)

    def threads(self, process: Process) -> dict[int, Thread]:
        threads = {}
        for tid, name in linux.threads(process.pid).items():
            state = linux.thread_state(process.pid, tid)
            ticks, switches = linux.cpu_ticks(process.pid, tid), linux.switches(process.pid, tid)
            if state is not None and ticks is not None and switches is not None:
                threads[tid] = Thread(name, state, ticks, switches)
        return threads if linux.start_ticks(process.pid) == process.ticks else {}

    def launched_ranks(self, root: Process) -> dict[Process, LaunchedRank]:
        processes = {process.pid: process for process in self.tree(root) if process != root}
        return {processes[pid]: rank for pid, rank in own_ranks(processes).items()}

    def exit_status(self, process: Process) -> int | None:
        return linux.ended_by(process.pid, process.ticks)

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        return linux.tcp_troubles(process.pid, process.ticks)

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        return (ContinueEntry(process.pid, process.ticks),)


#: The kernel of nodes that run on this host.
HOST = HostKernel()


@dataclass(frozen=True, slots=True)
class Process:
    """A process at the time of its lookup.

    Two objects are equal if they have the same pid, start time and kernel. Methods raise
    HarnessError if a remote node does not answer.

    Attributes:
        ticks: start time in clock ticks, which differs for a later process with the same pid. None
            if no such process existed.
        kernel: the kernel that runs it. Processes of different nodes may have equal pids.
    """

    pid: int
    ticks: int | None
    name: str = field(compare=False)
    kernel: Kernel = field(default=HOST, repr=False)

    def signal(self, signum: int) -> None:
        """Send a signal to the process. Raises ProcessLookupError if it is gone."""
        self.kernel.signal(self, signum)

    def is_gone(self) -> bool:
        """Return whether the process has ended, or is about to."""
        return self.kernel.is_gone(self)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal; False if it is gone."""
        return self.kernel.is_stopped(self)

    def threads(self) -> dict[int, Thread]:
        """Return the threads of the process by thread id; empty if it is gone."""
        return self.kernel.threads(self)
