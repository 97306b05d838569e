"""A warm process that forks agents, coordinators and wardens, so that an experiment costs no imports.

It serves one launcher over a socket and ends with it, however the launcher ends: then all that it started ends too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from chaoskit.control.agent import AgentSpec, run_agent
from chaoskit.control.coordinator import EXIT_OVER, CoordinatorSpec, run_coordinator
from chaoskit.osprocess import adopt_orphans, await_readable, children, set_name, socket_name
from chaoskit.runtime import zygote
from chaoskit.substrate import namespaces
from chaoskit.substrate.warden import WardenSpec, run_warden

_REQUEST_BYTES_MAX = 2**20
_END_S = 5.0
_RESTARTS_MAX = 16
_PATH_OPTION = "--connect"  # to the launcher: this nursery is the first process of a container
_OOM_SCORE = 300  # of 1000: more than the nursery ever has, as all use about the same memory
_LISTENERS = 2  # of a coordinator: for agents and observers, and for the store


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    """May carry a descriptor: the network namespace in which the node lives."""

    spec: AgentSpec


class StartCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Carries the listening sockets. They stay open while the job runs: a coordinator that ends before the job does is
    started again on them, and whoever connects meanwhile just waits. A further descriptor is its network namespace."""

    spec: CoordinatorSpec


class StartCommand(msgspec.Struct, frozen=True, tag=True):
    """Run a node's command. May carry a descriptor: the network namespace in which the node lives."""

    spec: WardenSpec


class EndProcesses(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL these children, and everything below them; before that they may end by themselves for a while."""

    pids: tuple[int, ...]
    patience_s: float = 0.0


_request_decoder = msgspec.json.Decoder(StartAgent | StartCoordinator | StartCommand | EndProcesses)


@dataclass
class _Coordinator:
    """The coordinator of one run, whichever process that is by now."""

    request: StartCoordinator
    descriptors: tuple[int, ...]  # its listeners, and its network namespace if it has one
    pid: int
    pidfd: int
    restarts: int = 0


class _Nursery:
    """Forks agents and coordinators, and keeps the coordinators going. The first pid of each is its name."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._coordinators: dict[int, _Coordinator] = {}

    def serve(self) -> None:
        """Until the launcher goes away."""
        while True:
            pidfds = [coordinator.pidfd for coordinator in self._coordinators.values()]
            readable = await_readable([self._connection.fileno(), *pidfds], 1.0)
            self._restart_coordinators(_reap())
            if self._connection.fileno() in readable and not self._obey():
                return

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _REQUEST_BYTES_MAX, _LISTENERS + 1)
        if not data:
            return False
        request = _request_decoder.decode(data)
        if isinstance(request, EndProcesses):
            self._restart_coordinators(_end(tuple(self._dismiss(pid) for pid in request.pids), request.patience_s))
            reply = 0
        elif isinstance(request, StartCoordinator):
            reply = self._start_coordinator(request, descriptors)
        else:
            reply = self._fork(request, descriptors)
        self._connection.send(str(reply).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    # -- coordinators ---------------------------------------------------------------------------------------------

    def _start_coordinator(self, request: StartCoordinator, descriptors: Sequence[int]) -> int:
        kept = tuple(map(os.dup, descriptors))
        pid = self._fork(request, kept)
        self._coordinators[pid] = _Coordinator(request, kept, pid, os.pidfd_open(pid))
        return pid

    def _restart_coordinators(self, ended: dict[int, int]) -> None:
        """Start the next process of each that has ended before its job did."""
        for first_pid, coordinator in list(self._coordinators.items()):
            if coordinator.pid not in ended:
                continue
            if ended[coordinator.pid] == EXIT_OVER or coordinator.restarts >= _RESTARTS_MAX:
                self._dismiss(first_pid)
                continue
            coordinator.pid = self._fork(coordinator.request, coordinator.descriptors)
            os.close(coordinator.pidfd)
            coordinator.pidfd = os.pidfd_open(coordinator.pid)
            coordinator.restarts += 1

    def _dismiss(self, first_pid: int) -> int:
        """Do not start this process again, if it is a coordinator. Gives the pid that stands for it now."""
        coordinator = self._coordinators.pop(first_pid, None)
        if coordinator is None:
            return first_pid
        for descriptor in (coordinator.pidfd, *coordinator.descriptors):
            os.close(descriptor)
        return coordinator.pid

    # -- processes ------------------------------------------------------------------------------------------------

    def _fork(self, request: StartAgent | StartCoordinator | StartCommand, descriptors: Sequence[int]) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._forget(descriptors)
            if _PATH_OPTION in sys.argv:
                _go_first()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            name = "coordinator" if isinstance(request, StartCoordinator) else request.spec.node
            _redirect(Path(request.spec.run_directory) / "log", name)
            sockets = _LISTENERS if isinstance(request, StartCoordinator) else 0
            for namespace in descriptors[sockets:]:
                namespaces.enter(namespace)
            if not isinstance(request, StartCoordinator):
                with contextlib.suppress(OSError):  # as this user it may not have any, and none of its disks can break
                    namespaces.leave_mounts()
            match request:
                case StartAgent(agent):
                    run_agent(agent, me)
                case StartCommand(command):
                    run_warden(command, me)
                case StartCoordinator(coordinator):
                    listeners = [socket.socket(fileno=listener) for listener in descriptors[:sockets]]
                    run_coordinator(coordinator, listeners, me)
        except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
            traceback.print_exc()
        finally:
            os._exit(1)

    def _forget(self, kept: Sequence[int]) -> None:
        """In a child: a port must close when its coordinator is given up."""
        self._connection.close()
        for coordinator in self._coordinators.values():
            os.close(coordinator.pidfd)
            for descriptor in set(coordinator.descriptors).difference(kept):
                os.close(descriptor)


def _go_first() -> None:
    """Where memory runs out, be ended before the nursery: its end would be that of the container."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _redirect(directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [descendant for child in below for descendant in _descendants(child)]


def _end(pids: tuple[int, ...], patience_s: float = 0.0) -> dict[int, int]:
    """SIGKILL these children and all below them. Gives what :func:`_reap` does: others may have ended meanwhile."""
    mine = set(children(os.getpid()))
    roots = [pid for pid in pids if pid in mine]
    _await_end(_handles(roots), patience_s)
    left = _handles([pid for root in roots for pid in (root, *_descendants(root))])
    for handle in left:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    _await_end(left, _END_S)
    return _reap()


def _handles(pids: list[int]) -> list[int]:
    """Pidfds of those that are not gone."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def _await_end(handles: list[int], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    for handle in handles:
        await_readable([handle], max(0.0, deadline_s - time.monotonic()))
        os.close(handle)


def _reap() -> dict[int, int]:
    """Children that have ended, with their exit codes; negative: killed by this signal."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def _launcher() -> socket.socket:
    """The connection to the launcher: standard input, or made to the path that an option names."""
    if _PATH_OPTION in sys.argv:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket_name(Path(sys.argv[sys.argv.index(_PATH_OPTION) + 1])) as name:
            connection.connect(name)
        return connection
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    return connection


def main() -> None:
    """Entry point."""
    set_name("ck-nursery")
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = _launcher()
    try:
        if "--cold" not in sys.argv:
            zygote.preload()
        gc.freeze()  # a collection in a child would touch, and so copy, every page of these objects
        connection.send(b"ready")
        _Nursery(connection).serve()
    finally:
        deadline_s = time.monotonic() + _END_S
        while (left := tuple(children(os.getpid()))) and time.monotonic() < deadline_s:  # orphans come one by one
            _end(left)
        os._exit(0)


if __name__ == "__main__":
    main()
