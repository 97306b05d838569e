"""The supervisor itself. It is warm: it forks programs from a process that has imported what they need.

It serves one runner and ends with it, however the runner ends: then all that it started ends, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from chaoskit import wire
from chaoskit.errors import ChaoskitError
from chaoskit.journal.writer import own_version
from chaoskit.osprocess import (
    adopt_orphans,
    await_readable,
    children,
    descendants,
    is_ending,
    reap,
    set_name,
    socket_name,
    start_ticks,
)
from chaoskit.substrate import namespaces
from chaoskit.substrate.supervisor.acts import Acts
from chaoskit.substrate.supervisor.door import Door
from chaoskit.substrate.supervisor.messages import (
    Apply,
    Done,
    End,
    Exited,
    Failed,
    Lift,
    LineClosed,
    LineData,
    Listen,
    Look,
    OpenDoor,
    Program,
    Ready,
    Report,
    Request,
    Shown,
    Signal,
    Start,
    Started,
    WhyNot,
)

TOKEN_VARIABLE = "CHAOSKIT_SUPERVISOR_TOKEN"
_END_S = 5.0
_COUNT_S = 0.05  # between two looks at what actions in force have met
_OOM_SCORE = 300  # of 1000: more than the supervisor ever has, as all use about the same memory
_RECEIVE_BYTES = 2**16
_DESCRIPTORS_MAX = 8  # with one message
_decode = wire.decoder(Request)


@dataclass(eq=False)
class _Started:
    """A program that was started, whichever process it is by now.

    Attributes:
        descriptors: of one that may be started again: its listeners, and its network namespace if it has one.
        pid: its process; None once it is over.
        orphans: what it has left behind, and this process has adopted.
    """

    program: Program
    descriptors: tuple[int, ...]
    listeners: int
    pid: int | None
    ticks: int | None
    restarts: int = 0
    orphans: list[int] = field(default_factory=list)

    def give_up(self) -> None:
        """Close its sockets: it is not started again."""
        _close(self.descriptors)
        self.descriptors = ()


class Supervisor:
    """Forks programs, and keeps going those that are to be. The first pid of each is its name.

    Args:
        connection: to the runner. is_first: whether this is the first process of a container.
    """

    def __init__(self, connection: socket.socket, *, is_first: bool) -> None:
        self._connection, self._is_first = connection, is_first
        self._splitter, self._descriptors = wire.Splitter(_decode), deque[int]()
        self._started: dict[tuple[int, int | None], _Started] = {}  # by first pid and start time, until they are ended
        self._kept: dict[int, socket.socket] = {}  # listeners for programs that are to be started
        self._acts = Acts()
        self._door: Door | None = None
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()  # by SIGCHLD
        for one in (self._wakes, self._woken):
            one.setblocking(False)

    def serve(self) -> None:
        """Until the runner goes away."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._reap)
        self._selector.register(self._connection, selectors.EVENT_READ, self._obey)
        self.tell(Ready(own_version()))
        try:
            while True:
                for key, _ in self._selector.select(_COUNT_S if self._acts.in_force else None):
                    key.data()
                for number, count in self._acts.counted():
                    self.tell(Shown(number, count))
        except ConnectionError:
            pass
        finally:
            if self._door is not None:
                self._door.close()
            self._acts.close()

    def tell(self, report: Report) -> None:
        """Raises ConnectionError where the runner is gone."""
        wire.send(self._connection, report)

    def _obey(self) -> None:
        if self._connection.family == socket.AF_UNIX:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _RECEIVE_BYTES, _DESCRIPTORS_MAX)
            self._descriptors.extend(descriptors)
        else:
            data = self._connection.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the runner is gone")
        for request in self._splitter.feed(data):
            if isinstance(request, LineData | LineClosed):
                if self._door is not None:
                    self._door.take(request)
                continue
            try:
                self.tell(self._carry_out(request))
            except ProcessLookupError as error:
                self.tell(Failed(request.number, str(error), is_gone=True))
            except ConnectionError:
                raise
            except (OSError, ChaoskitError) as error:
                self.tell(Failed(request.number, str(error)))

    def _carry_out(self, request: Any) -> Report:
        match request:
            case Start():
                return self._start(request)
            case End(number, programs, patience_s):
                self._acts.release()
                self._end(programs, patience_s)
                return Done(number)
            case Listen(number, host, port):
                return Done(number, self._listen(host, port))
            case OpenDoor(number, path):
                if self._door is not None:
                    self._door.close()
                self._door = Door(Path(path), self.tell, self._selector)
                return Done(number)
            case Look() | Signal() | WhyNot() | Apply() | Lift():
                return Done(request.number, self._acts.carry_out(request))
        raise AssertionError(request)

    def _listen(self, host: str, port: int) -> bytes:
        listener = socket.create_server((host, port), backlog=128)
        self._kept[listener.fileno()] = listener
        return self._acts.encode((listener.fileno(), *listener.getsockname()[:2]))

    # -- programs -------------------------------------------------------------------------------------------------

    def _start(self, request: Start) -> Started:
        came = tuple(self._descriptors.popleft() for _ in range(request.listeners + request.enters))
        kept = tuple(self._kept.pop(number).detach() for number in request.kept)
        descriptors, listeners = (*kept, *came), len(kept) + request.listeners
        pid = self._fork(request.program, descriptors, listeners)
        ticks = start_ticks(pid)
        if not request.program.restarts:
            _close(descriptors)
            descriptors = ()
        self._started[pid, ticks] = _Started(request.program, descriptors, listeners, pid, ticks)
        return Started(request.number, pid, ticks)

    def _reap(self) -> None:
        """Take note of children that have ended, and start again what has before it was over."""
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(_RECEIVE_BYTES):
                pass
        ended = reap()
        for one in self._started.values():
            if one.pid in ended:
                self._adopt(one)
                self._go_on(one, os.waitstatus_to_exitcode(ended[one.pid]))
        for pid, status in ended.items():
            self.tell(Exited(pid, status))

    def _adopt(self, one: _Started) -> None:
        """Take note of what it leaves behind: every program adopts orphans, so new children are of one that ended."""
        known = {pid for other in self._started.values() for pid in (other.pid, *other.orphans)}
        one.orphans += [pid for pid in children(os.getpid()) if pid not in known and pid != self._acts.guard_pid]

    def _go_on(self, one: _Started, exit_code: int) -> None:
        if one.restarts < one.program.restarts and exit_code != one.program.over:
            one.pid = self._fork(one.program, one.descriptors, one.listeners)
            one.ticks = start_ticks(one.pid)
            one.restarts += 1
        else:
            one.pid = None
            one.give_up()

    def _end(self, programs: Sequence[tuple[int, int | None]], patience_s: float) -> None:
        """SIGKILL programs and all below them, until nothing is left: a process may fork meanwhile."""
        ending = [self._started.pop(program) for program in programs if program in self._started]
        for one in ending:
            one.give_up()
        _await_end([one.pid for one in ending if one.pid is not None], patience_s)
        deadline_s = time.monotonic() + _END_S
        while True:
            for one in ending:
                self._adopt(one)
            roots = [pid for one in ending for pid in (one.pid, *one.orphans) if pid is not None]
            left = [pid for root in roots for pid in (root, *descendants(root)) if not is_ending(pid)]
            if not left or time.monotonic() > deadline_s:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # all are below this process, which has not reaped them
            _await_end(left, max(0.0, deadline_s - time.monotonic()))
        self._reap()

    def _fork(self, program: Program, descriptors: Sequence[int], listeners: int) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._forget(descriptors)
            adopt_orphans()
            if self._is_first:
                _go_first()
            _redirect(Path(program.run_directory) / "log", program.name)
            for namespace in descriptors[listeners:]:
                namespaces.enter(namespace)
            if not listeners:
                with contextlib.suppress(OSError):  # this user may not have any: then none of its disks can break
                    namespaces.leave_mounts()
            module, _, function = program.entry.partition(":")
            sockets = [socket.socket(fileno=listener) for listener in descriptors[:listeners]]
            getattr(import_module(module), function)(program.arguments, sockets, me)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)

    def _forget(self, kept: Sequence[int]) -> None:
        """In a child: a port must close when its program is given up."""
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        self._selector.close()
        for one in (self._connection, self._wakes, self._woken, *self._kept.values()):
            one.close()
        if self._door is not None:
            self._door.forget()
        for started in self._started.values():
            _close(set(started.descriptors).difference(kept))
        self._acts.forget()


def _close(descriptors: Sequence[int] | set[int]) -> None:
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


def _await_end(pids: Sequence[int], limit_s: float) -> None:
    """Wait until these processes have ended, or so long."""
    deadline_s = time.monotonic() + limit_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            await_readable([handle], max(0.0, deadline_s - time.monotonic()))
            os.close(handle)


def _end_all() -> None:
    """SIGKILL everything below this process, until nothing is left, or it does not end."""
    deadline_s = time.monotonic() + _END_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _await_end(left, max(0.0, deadline_s - time.monotonic()))
        reap()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaoskit.substrate.supervisor", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--connect", metavar="PATH", help="to the runner's Unix socket, as first process of a container")
    where.add_argument("--dial", metavar="HOST:PORT", help=f"the runner; its token is in {TOKEN_VARIABLE}")
    parser.add_argument("--cold", action="store_true", help="import nothing beforehand")
    return parser.parse_args()


def _runner(arguments: argparse.Namespace) -> socket.socket:
    """The connection to the runner: standard input, unless an option names another one. Raises OSError, Refused."""
    if arguments.dial:
        host, _, port = arguments.dial.rpartition(":")
        return wire.connect((host, int(port)), os.environ.pop(TOKEN_VARIABLE, ""))
    if arguments.connect:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_name(Path(arguments.connect)) as name:
            connection.connect(name)
        return connection
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    return connection


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    set_name("ck-supervisor")
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection = _runner(arguments)
    except (OSError, ChaoskitError) as error:
        sys.exit(f"chaoskit: the runner cannot be reached: {error}")
    try:
        if not arguments.cold:
            from chaoskit.control import agent, coordinator  # noqa: F401 - programs find them imported
            from chaoskit.runtime import zygote

            zygote.preload()
        gc.freeze()  # a collection in a child would touch, and so copy, every page of these objects
        Supervisor(connection, is_first=bool(arguments.connect or arguments.dial)).serve()
    except BaseException:  # noqa: BLE001 - told before what it started is ended
        traceback.print_exc()
    finally:
        _end_all()
        os._exit(0)
