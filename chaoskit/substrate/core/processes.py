"""Processes of a node, and the kernel that knows them: of this host, or of wherever the node runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from chaoskit.process import linux
from chaoskit.process.linux import TcpTroubles
from chaoskit.substrate.undo import ContinueEntry, UndoEntry


class Thread(NamedTuple):
    """A thread as the kernel shows it.

    Attributes:
        state: R, S, D, T (stopped) and others. cpu_ticks: CPU time in clock ticks. switches: how often the kernel has
            switched it off a CPU; constant while it sleeps.
    """

    name: str
    state: str
    cpu_ticks: int
    switches: int


class Kernel(Protocol):
    """The kernel under which the processes of a node run. A process is a pid and its start time in clock ticks."""

    def find(self, pid: int) -> Process:
        """The process that has this pid now."""

    def tree(self, root: Process) -> list[Process]:
        """A process and what is below it, without what is ending; nothing where it is gone."""

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal. Raises ProcessLookupError where the process is gone."""

    def is_gone(self, process: Process) -> bool:
        """Whether it has ended, or is so far into its exit that no code of it runs any more."""

    def is_stopped(self, process: Process) -> bool:
        """Whether it is stopped by a signal."""

    def threads(self, process: Process) -> dict[int, Thread]:
        """Its threads by tid; none where it is gone."""

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        """What TCP has noticed in its network; nothing where it is gone."""

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        """What continues it if the runner is killed while it is stopped; nothing where that is seen to elsewhere."""


class HostKernel:
    """The kernel of this host, as this process sees it."""

    def find(self, pid: int) -> Process:
        return Process(pid, linux.start_ticks(pid), linux.process_name(pid), self)

    def tree(self, root: Process) -> list[Process]:
        if root.ticks is None or linux.start_ticks(root.pid) != root.ticks:
            return []
        below = linux.descendants(root.pid)
        return [self.find(pid) for pid in (root.pid, *below) if not linux.is_ending(pid)]

    def signal(self, process: Process, signum: int) -> None:
        is_gone = f"{process.name} (pid {process.pid}) is gone"
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            raise ProcessLookupError(is_gone) from None
        try:
            if self.is_gone(process):
                raise ProcessLookupError(is_gone)
            signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)

    def is_gone(self, process: Process) -> bool:
        return linux.start_ticks(process.pid) != process.ticks or linux.is_ending(process.pid)

    def is_stopped(self, process: Process) -> bool:
        return linux.is_stopped(process.pid, process.ticks)

    def threads(self, process: Process) -> dict[int, Thread]:
        found = {}
        for tid, name in linux.threads(process.pid).items():
            state = linux.thread_state(process.pid, tid)
            ticks, switches = linux.cpu_ticks(process.pid, tid), linux.switches(process.pid, tid)
            if state is not None and ticks is not None and switches is not None:
                found[tid] = Thread(name, state, ticks, switches)
        return found if linux.start_ticks(process.pid) == process.ticks else {}

    def tcp_troubles(self, process: Process) -> TcpTroubles:
        return linux.tcp_troubles(process.pid, process.ticks)

    def undo_stop(self, process: Process) -> Sequence[UndoEntry]:
        return (ContinueEntry(process.pid, process.ticks),)


#: Of the nodes that run beside this process.
HOST = HostKernel()


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when it was looked up: ``ticks`` is its start time, which tells it from a later namesake.

    Attributes:
        kernel: the one that knows it: pids of different nodes may be equal.
    """

    pid: int
    ticks: int | None
    name: str = field(compare=False)
    kernel: Kernel = field(default=HOST, repr=False)

    def signal(self, signum: int) -> None:
        """Send it a signal. Raises ProcessLookupError where it is gone."""
        self.kernel.signal(self, signum)

    def is_gone(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.kernel.is_gone(self)

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal."""
        return self.kernel.is_stopped(self)

    def threads(self) -> dict[int, Thread]:
        """Its threads by tid; none where it is gone."""
        return self.kernel.threads(self)
