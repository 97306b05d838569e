"""The guard: a small process that waits for its runner's end, and puts back what is then open in its undo file.

It imports the standard library only, and no package of the environment: 60 ms to start, about 10 MB of its own.
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

#: What it says once, when it holds the file.
READY = b"ready"
_PATIENCE_S = 30.0
_FAREWELL_S = 6.0  # a supervisor takes up to 5 s to end what it has started
_ROOT = Path(__file__).resolve().parents[3]
_CODE = "import sys; sys.path.append(sys.argv[1]); from chaoskit.substrate.undo.guard import main; main()"


def command(path: Path, runner_pid: int) -> list[str]:
    """Return the arguments of the interpreter that make it the guard of an undo file."""
    return ["-I", "-S", "-c", _CODE, str(_ROOT), str(path), str(runner_pid)]


def main() -> None:
    """Entry point. Standard input is the runner, standard output is closed when it is ready."""
    path, runner_pid = Path(sys.argv[2]), int(sys.argv[3])
    set_name("ck-guard")
    for signum in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # a Ctrl-C, or a closed terminal, is the runner's
        signal.signal(signum, signal.SIG_IGN)
    descriptor = files.share(path)
    runner = _watch(runner_pid)
    _let_go_of(2)  # before it is ready: a reader of the runner's output sees it end with the runner
    with contextlib.suppress(
        BrokenPipeError
    ):  # the runner is gone already: what is open is put back at once
        os.write(1, READY + b"\n")
    _let_go_of(1)
    _await_end(runner)
    if is_over(*replay_file(descriptor, _PATIENCE_S, _FAREWELL_S)):
        files.remove(path, descriptor)


def _watch(pid: int) -> int | None:
    """A handle of the runner; None where it is gone already."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    return handle if os.getppid() == pid else None


def _let_go_of(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _await_end(runner: int | None) -> None:
    """Until the runner says that it ends, or is gone. A closed input alone is no end: it may have closed all it had."""
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
