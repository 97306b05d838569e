"""The guard: a small process that undoes the open entries of its runner when that is gone.

It imports only the standard library and chaoskit itself: it starts in 60 ms and takes about 10 MB.

-> ``undo/replay.py``: how the entries are undone. ``undo/janitor.py``: what happens if the guard is
killed, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path

from chaoskit.process.linux import set_name
from chaoskit.substrate.undo import files
from chaoskit.substrate.undo.replay import is_over, replay_file

#: Line that the guard prints once it holds the undo file.
READY = b"ready"
_PATIENCE_S = 30.0
_FAREWELL_S = 6.0  # a supervisor takes up to 5 s to end what it has started
_ROOT = Path(__file__).resolve().parents[3]
_CODE = "import sys; sys.path.append(sys.argv[1]); from chaoskit.substrate.undo.guard import main; main()"


def command(path: Path, runner_pid: int) -> list[str]:
    """Return the interpreter's arguments that start the guard of an undo file."""
    return ["-I", "-S", "-c", _CODE, str(_ROOT), str(path), str(runner_pid)]


def main() -> None:
    """Wait for the end of the runner, and undo its open entries: the entry point of the guard.

    Standard input is the runner's pipe. Standard output gets the line :data:`READY`, and is closed.
    The undo file is removed if nothing has failed; otherwise it stays for the janitor.
    """
    path, runner_pid = Path(sys.argv[2]), int(sys.argv[3])
    set_name("ck-guard")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # for the runner
        signal.signal(signum, signal.SIG_IGN)
    descriptor = files.lock_shared(path)
    runner = _watch(runner_pid)
    _redirect_to_null(2)  # else a reader of the runner's output would not see its end
    with contextlib.suppress(BrokenPipeError):  # the runner is gone already: undo at once
        os.write(1, READY + b"\n")
    _redirect_to_null(1)
    _await_end(runner)
    if is_over(*replay_file(descriptor, _PATIENCE_S, _FAREWELL_S)):
        files.remove(path, descriptor)


def _watch(pid: int) -> int | None:
    """Return a pidfd of the runner, or None if it is gone already or not the parent any more."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    return handle if os.getppid() == pid else None


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _await_end(runner: int | None) -> None:
    """Wait until the runner reports its end, or is gone.

    A closed input alone is no end: the runner may have closed all its descriptors.
    """
    if runner is None:
        return
    poller = select.poll()
    poller.register(runner, select.POLLIN)
    poller.register(0, select.POLLIN)
    while True:
        woken = {descriptor for descriptor, _ in poller.poll()}
        if runner in woken or (0 in woken and os.read(0, 16)):
            return
        poller.unregister(0)
