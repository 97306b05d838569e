"""Programs of a supervisor: forked, restarted while they are incomplete, and ended.

-> ``cluster/supervised.py``: which programs a run has. ``supervisor/server.py``: when they are
ended, such as after SIGTERM or the end of the runner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import msgspec

from chaoskit.process.linux import (
    adopt_orphans,
    await_readable,
    children,
    descendants,
    is_ending,
    kill_if_same,
    reap,
    start_ticks,
)
from chaoskit.process.run_clock import set_ahead
from chaoskit.substrate.core import namespaces
from chaoskit.substrate.supervisor.messages import Program

_END_S = 5.0
_OOM_SCORE = 300  # of 1000: above the supervisor's, as all use about the same memory

#: Identifier of a program: pid and start time of its first process.
ProgramId = tuple[int, int | None]


@dataclass(eq=False)
class _Started:
    """A program that was started.

    Attributes:
        descriptors: of a program that may be restarted: its listeners, and its network namespace if
            it has one.
        listeners: number of listeners among the descriptors.
        pid: its current process; None once it is complete.
    """

    program: Program
    descriptors: tuple[int, ...]
    listeners: int
    pid: int | None
    restarts: int = 0

    def give_up(self) -> None:
        """Close the descriptors: the program is not restarted any more."""
        _close(self.descriptors)
        self.descriptors = ()


class Programs:
    """All programs of a supervisor.

    Each program adopts the orphans below it. When it ends, the supervisor adopts them. A program
    without listening sockets gets mounts of its own where that is permitted, for disk faults.

    Args:
        close_in_child: called in each child before its program begins, to close what belongs to the
            supervisor.
        other_children: returns the pids of children that are not programs.
        is_first: True if the supervisor is the first process of a container.
    """

    def __init__(
        self,
        close_in_child: Callable[[], None],
        other_children: Callable[[], set[int]],
        *,
        is_first: bool,
    ) -> None:
        self._close_in_child, self._other_children, self._is_first = (
            close_in_child,
            other_children,
            is_first,
        )
        self._started: dict[ProgramId, _Started] = {}  # until they are ended
        self._orphans: dict[int, frozenset[ProgramId]] = {}  # pid -> programs that may own it

    def start(self, program: Program, descriptors: Sequence[int], listeners: int) -> ProgramId:
        """Fork a program, and return its identifier: the pid and start time of its process.

        Args:
            descriptors: listening sockets, then the network namespace if the program enters one.
                They are closed later.
            listeners: number of listening sockets.

        Raises:
            OSError: if no process can be created.
        """
        try:
            pid = self._fork(program, descriptors, listeners)
        except OSError:
            _close(descriptors)
            raise
        program_id, started = (
            (pid, start_ticks(pid)),
            _Started(program, tuple(descriptors), listeners, pid),
        )
        if not program.restarts:
            started.give_up()
        self._started[program_id] = started
        return program_id

    def reap(self) -> dict[int, int]:
        """Reap ended children and restart incomplete programs.

        Return the wait status of each reaped child by its pid.
        """
        ended = reap()
        ended_programs = {
            program_id: started
            for program_id, started in self._started.items()
            if started.pid in ended
        }
        owners = frozenset(ended_programs).union(
            *(self._orphans.pop(pid, frozenset[ProgramId]()) for pid in ended)
        )
        for started in ended_programs.values():
            self._restart_or_finish(started, os.waitstatus_to_exitcode(ended[started.pid or 0]))
        expected = (
            {started.pid for started in self._started.values()}
            | self._other_children()
            | set(self._orphans)
        )
        self._orphans |= dict.fromkeys(
            set(children(os.getpid())) - expected, owners or frozenset(self._started)
        )
        return ended

    def _restart_or_finish(self, started: _Started, exit_code: int) -> None:
        """Restart a program whose process has ended, unless it is complete.

        A program that has used up its restarts, or cannot be forked, is given up.
        """
        started.pid = None
        if started.restarts < started.program.restarts and exit_code != started.program.over:
            with contextlib.suppress(OSError):  # no process can be created
                started.pid = self._fork(started.program, started.descriptors, started.listeners)
                started.restarts += 1
        if started.pid is None:
            started.give_up()

    def end(self, program_ids: Iterable[ProgramId], patience_s: float) -> dict[int, int]:
        """Kill programs with all that they have started, and wait up to 5 s until nothing is left.

        Return the wait statuses by pid, as :meth:`reap` does. Processes that remain are not
        reported.

        Args:
            patience_s: time in which the programs may end by themselves first.
        """
        ended_ids = frozenset(program_ids)
        ending = [
            started for program_id, started in self._started.items() if program_id in ended_ids
        ]
        for started in ending:
            started.program = _without_restarts(started.program)
            started.give_up()
        _await_end([started.pid for started in ending if started.pid is not None], patience_s)
        ended, deadline_s = self.reap(), time.monotonic() + _END_S
        while (left := self._live_processes(ending, ended_ids)) or _have_unreaped(ending):
            _kill(left)
            _await_end(left, max(0.0, deadline_s - time.monotonic()))
            ended |= self.reap()
            if time.monotonic() > deadline_s:
                break
        for program_id in ended_ids:
            self._started.pop(program_id, None)
        return ended

    def _live_processes(
        self, ending: Sequence[_Started], program_ids: frozenset[ProgramId]
    ) -> list[int]:
        """Return the pids of the live processes of these programs, orphans included."""
        roots = [started.pid for started in ending if started.pid is not None]
        roots += [pid for pid, owners in self._orphans.items() if owners & program_ids]
        return [pid for root in roots for pid in (root, *descendants(root)) if not is_ending(pid)]

    def signal_all(self, signum: int) -> None:
        """Send a signal to every running program. None of them is restarted when it ends."""
        for started in self._started.values():
            started.program = _without_restarts(started.program)
            started.give_up()
            if started.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(started.pid, signum)  # not reaped yet, so its pid is not reused

    def are_running(self) -> bool:
        """Return whether any program runs."""
        return any(started.pid is not None for started in self._started.values())

    def end_all(self) -> dict[int, int]:
        """Kill everything below this process except the other children, and wait up to 5 s.

        Return the wait statuses by pid, as :meth:`reap` does. Processes that remain are not
        reported.
        """
        ended, deadline_s = self.reap(), time.monotonic() + _END_S
        while (
            left := set(descendants(os.getpid())) - self._other_children()
        ) and time.monotonic() < deadline_s:
            _kill(left)
            _await_end(left, max(0.0, deadline_s - time.monotonic()))
            ended |= self.reap()
        return ended

    def _fork(self, program: Program, descriptors: Sequence[int], listeners: int) -> int:
        """Fork a process and run a program in it. Return its pid; the child does not return."""
        supervisor_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._close_in_child()
            set_ahead(program.clock_ahead_ns)
            for started in self._started.values():
                # else the ports of an ended program would stay open
                _close(set(started.descriptors).difference(descriptors))
            adopt_orphans()
            if self._is_first:
                _raise_oom_score()
            _redirect(Path(program.run_directory) / "log", program.name)
            for namespace in descriptors[listeners:]:
                namespaces.enter(namespace)
            if not listeners:
                with contextlib.suppress(OSError):  # not permitted: disk faults are unavailable
                    namespaces.leave_mounts()
            module, _, function = program.entry.partition(":")
            sockets = [socket.socket(fileno=listener) for listener in descriptors[:listeners]]
            getattr(import_module(module), function)(program.arguments, sockets, supervisor_pid)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)


def _without_restarts(program: Program) -> Program:
    """Return the program with restarts turned off."""
    return msgspec.structs.replace(program, restarts=0, over=0)


def _have_unreaped(programs: Iterable[_Started]) -> bool:
    """Return whether any program is not reaped yet: its orphans are found when it is."""
    return any(program.pid is not None for program in programs)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _raise_oom_score() -> None:
    """Raise this process's OOM score above the supervisor's.

    The end of the supervisor would be that of the container.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _redirect(directory: Path, name: str) -> None:
    """Append standard output and standard error of this process to a log file."""
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _kill(pids: Iterable[int]) -> None:
    """SIGKILL processes, without those that are gone."""
    for pid, ticks in [(pid, start_ticks(pid)) for pid in pids]:
        if ticks is not None:
            kill_if_same(pid, ticks, signal.SIGKILL)


def _await_end(pids: Iterable[int], limit_s: float) -> None:
    """Wait until these processes have ended, or until the limit, which all of them share."""
    deadline_s = time.monotonic() + limit_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            await_readable([handle], max(0.0, deadline_s - time.monotonic()))
            os.close(handle)
