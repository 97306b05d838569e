"""A warm process that forks agents and coordinators, so that an experiment costs no imports.

It serves one launcher over a socket and ends with it, however the launcher ends: then all that it started ends too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
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
    """SIGKILL these children, and everything below them; before that they may end by themselves for a while."""

    pids: tuple[int, ...]
    patience_s: float = 0.0


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
            _end(request.pids, request.patience_s)
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


def _end(pids: tuple[int, ...], patience_s: float = 0.0) -> None:
    mine = set(children(os.getpid()))
    roots = [pid for pid in pids if pid in mine]
    _await_end(_handles(roots), patience_s)
    left = _handles([pid for root in roots for pid in (root, *_descendants(root))])
    for handle in left:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    _await_end(left, _END_S)
    _reap()


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
        select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))
        os.close(handle)


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
