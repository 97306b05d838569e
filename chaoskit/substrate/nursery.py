"""A warm process that forks agents and coordinators, so that an experiment costs no imports.

It serves one launcher over a socket and ends with it, however the launcher ends: then all that it started ends too.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

from chaoskit.control.agent import AgentSpec, run_agent
from chaoskit.control.coordinator import CoordinatorSpec, run_coordinator
from chaoskit.osprocess import adopt_orphans, children, set_name
from chaoskit.runtime import zygote

_REQUEST_BYTES_MAX = 2**20
_END_S = 5.0


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    spec: AgentSpec


class StartCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Carries one descriptor: the listening socket."""

    spec: CoordinatorSpec


class EndProcesses(msgspec.Struct, frozen=True, tag=True):
    """SIGKILL these children, and everything below them."""

    pids: tuple[int, ...]


_request_decoder = msgspec.json.Decoder(StartAgent | StartCoordinator | EndProcesses)


def _serve(connection: socket.socket) -> None:
    while True:
        readable, _, _ = select.select([connection], [], [], 1.0)
        _reap()
        if not readable:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES_MAX, 1)
        if not data:
            return
        request = _request_decoder.decode(data)
        if isinstance(request, EndProcesses):
            _end(request.pids)
            connection.send(b"0")
        else:
            connection.send(str(_fork(connection, request, descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(connection: socket.socket, request: StartAgent | StartCoordinator, descriptors: list[int]) -> int:
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        connection.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name = request.spec.node if isinstance(request, StartAgent) else "coordinator"
        _redirect(Path(request.spec.run_directory) / "log", name)
        if isinstance(request, StartAgent):
            run_agent(request.spec, me)
        else:
            run_coordinator(request.spec, socket.socket(fileno=descriptors[0]), me)
    except BaseException:  # noqa: BLE001 - a forked child must end here, whatever happened
        traceback.print_exc()
    finally:
        os._exit(1)


def _redirect(directory: Path, name: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _descendants(pid: int) -> list[int]:
    below = children(pid)
    return below + [descendant for child in below for descendant in _descendants(child)]


def _end(pids: tuple[int, ...]) -> None:
    mine = set(children(os.getpid()))
    targets = [pid for root in pids if root in mine for pid in (root, *_descendants(root))]
    handles = [handle for pid in targets if (handle := _kill(pid)) is not None]
    for handle in handles:
        select.select([handle], [], [], _END_S)
        os.close(handle)
    _reap()


def _kill(pid: int) -> int | None:
    """A pidfd that becomes readable when the process is gone; None if it is."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        os.close(handle)
        return None
    return handle


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> None:
    """Entry point; the launcher's socket is standard input."""
    set_name("ck-nursery")
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    try:
        if "--cold" not in sys.argv:
            zygote.preload()
        connection.send(b"ready")
        _serve(connection)
    finally:
        _end(tuple(children(os.getpid())))
        os._exit(0)


if __name__ == "__main__":
    main()
