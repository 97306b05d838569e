"""The programs that a supervisor has started: forked, started again while they are not over, and ended for good."""

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
_OOM_SCORE = 300  # of 1000: more than the supervisor ever has, as all use about the same memory

#: A program by the process that it was first: pid and start time.
Name = tuple[int, int | None]


@dataclass(eq=False)
class _Started:
    """A program that was started.

    Attributes:
        descriptors: of one that may be started again: its listeners, and its network namespace if it has one.
        pid: the process that it is by now; None once it is over.
    """

    program: Program
    descriptors: tuple[int, ...]
    listeners: int
    pid: int | None
    restarts: int = 0

    def give_up(self) -> None:
        """Close its sockets: it is not started again."""
        _close(self.descriptors)
        self.descriptors = ()


class Programs:
    """Every program adopts what loses its parent below it; when it ends, that comes to the supervisor.

    Args:
        forget: called in each child, before its program begins: lets go of what is the supervisor's.
        is_first: whether the supervisor is the first process of a container.
        others: pids of children that are no programs.
    """

    def __init__(
        self, forget: Callable[[], None], others: Callable[[], set[int]], *, is_first: bool
    ) -> None:
        self._forget, self._others, self._is_first = forget, others, is_first
        self._started: dict[Name, _Started] = {}  # until they are ended
        self._orphans: dict[
            int, frozenset[Name]
        ] = {}  # pid -> the programs of which one has left it behind

    def start(self, program: Program, descriptors: Sequence[int], listeners: int) -> Name:
        """Fork it. The descriptors are taken over: listening sockets, and a network namespace where it enters one.

        Raises:
            OSError: if there can be no further process.
        """
        try:
            pid = self._fork(program, descriptors, listeners)
        except OSError:
            _close(descriptors)
            raise
        name, started = (
            (pid, start_ticks(pid)),
            _Started(program, tuple(descriptors), listeners, pid),
        )
        if not program.restarts:
            started.give_up()
        self._started[name] = started
        return name

    def reap(self) -> dict[int, int]:
        """Take note of children that have ended, and start again what has before it was over. Gives wait statuses."""
        ended = reap()
        gone = {name: one for name, one in self._started.items() if one.pid in ended}
        owners = frozenset(gone).union(
            *(self._orphans.pop(pid, frozenset[Name]()) for pid in ended)
        )
        for one in gone.values():
            self._go_on(one, os.waitstatus_to_exitcode(ended[one.pid or 0]))
        known = {one.pid for one in self._started.values()} | self._others() | set(self._orphans)
        self._orphans |= dict.fromkeys(
            set(children(os.getpid())) - known, owners or frozenset(self._started)
        )
        return ended

    def _go_on(self, one: _Started, exit_code: int) -> None:
        one.pid = None
        if one.restarts < one.program.restarts and exit_code != one.program.over:
            with contextlib.suppress(OSError):  # no further process can be had: it is over
                one.pid = self._fork(one.program, one.descriptors, one.listeners)
                one.restarts += 1
        if one.pid is None:
            one.give_up()

    def end(self, names: Iterable[Name], patience_s: float) -> dict[int, int]:
        """SIGKILL programs and all that they have started, until nothing is left. Gives what :meth:`reap` does."""
        wanted = frozenset(names)
        ending = [one for name, one in self._started.items() if name in wanted]
        for one in ending:
            one.program = _once(one.program)
            one.give_up()
        _await_end([one.pid for one in ending if one.pid is not None], patience_s)
        ended, deadline_s = self.reap(), time.monotonic() + _END_S
        while left := self._left(ending, wanted):
            _kill(left)
            _await_end(left, max(0.0, deadline_s - time.monotonic()))
            ended |= self.reap()
            if time.monotonic() > deadline_s:
                break
        for name in wanted:
            self._started.pop(name, None)
        return ended

    def _left(self, ending: Sequence[_Started], names: frozenset[Name]) -> list[int]:
        """What lives of these programs."""
        roots = [one.pid for one in ending if one.pid is not None]
        roots += [pid for pid, owners in self._orphans.items() if owners & names]
        return [pid for root in roots for pid in (root, *descendants(root)) if not is_ending(pid)]

    def signal_all(self, signum: int) -> None:
        """Send a signal to every program that runs. None of them is started again when it ends."""
        for one in self._started.values():
            one.program = _once(one.program)
            one.give_up()
            if one.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(
                        one.pid, signum
                    )  # a child that is not reaped: no other process has its pid

    def are_running(self) -> bool:
        """Whether any of them runs."""
        return any(one.pid is not None for one in self._started.values())

    def end_all(self) -> dict[int, int]:
        """SIGKILL everything below this process but the others, until nothing is left, or it does not end.

        Gives what :meth:`reap` does.
        """
        ended, deadline_s = self.reap(), time.monotonic() + _END_S
        while (
            left := set(descendants(os.getpid())) - self._others()
        ) and time.monotonic() < deadline_s:
            _kill(left)
            _await_end(left, max(0.0, deadline_s - time.monotonic()))
            ended |= self.reap()
        return ended

    def _fork(self, program: Program, descriptors: Sequence[int], listeners: int) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._forget()
            set_ahead(program.clock_ahead_ns)
            for one in self._started.values():
                _close(
                    set(one.descriptors).difference(descriptors)
                )  # a port must close when its program is given up
            adopt_orphans()
            if self._is_first:
                _go_first()
            _redirect(Path(program.run_directory) / "log", program.name)
            for namespace in descriptors[listeners:]:
                namespaces.enter(namespace)
            if not listeners:
                with contextlib.suppress(
                    OSError
                ):  # this user may not have any: then none of its disks can break
                    namespaces.leave_mounts()
            module, _, function = program.entry.partition(":")
            sockets = [socket.socket(fileno=listener) for listener in descriptors[:listeners]]
            getattr(import_module(module), function)(program.arguments, sockets, me)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)


def _once(program: Program) -> Program:
    """The same, not to be started again."""
    return msgspec.structs.replace(program, restarts=0, over=0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _go_first() -> None:
    """Where memory runs out, be ended before the supervisor: its end would be that of the container."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _redirect(directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _kill(pids: Iterable[int]) -> None:
    for pid, ticks in [(pid, start_ticks(pid)) for pid in pids]:
        if ticks is not None:
            kill_if_same(pid, ticks, signal.SIGKILL)


def _await_end(pids: Iterable[int], limit_s: float) -> None:
    """Wait until these processes have ended, or so long."""
    deadline_s = time.monotonic() + limit_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            await_readable([handle], max(0.0, deadline_s - time.monotonic()))
            os.close(handle)
