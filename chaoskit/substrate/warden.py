"""Runs one node's command, and ends everything below it when it ends, or when its launcher does.

A command may start what it likes, and leave it behind: whatever has lost its parent comes to the warden, as it comes to
the first process of a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from chaoskit.journal import Journal
from chaoskit.osprocess import adopt_orphans, descendants, describe_status, die_with_parent, set_name
from chaoskit.vocabulary import Event

NAME = "ck-warden"
_HEARD = (signal.SIGCHLD, signal.SIGTERM)
_EXIT_NOT_STARTED = 127  # as shells say it
_LOOK_S = 0.002


class WardenSpec(msgspec.Struct, frozen=True):
    """A command on a node. What it prints goes to the node's log."""

    node: str
    command: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    run_directory: str


def run_warden(spec: WardenSpec, parent_pid: int) -> None:
    """Until the command has ended, or SIGTERM says that it shall. Never returns with a live process below it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    die_with_parent(parent_pid, signal.SIGTERM)
    adopt_orphans()
    set_name(NAME)
    journal = Journal(Path(spec.run_directory) / "journal", spec.node, role="warden", node=spec.node)
    root = _start(spec)
    journal.write(Event.COMMAND_STARTED, pid=root, command=spec.command)
    status = None
    while status is None and signal.sigwait(_HEARD) == signal.SIGCHLD:
        status = _reap().get(root)
    if status is not None:
        how, told = describe_status(status)
        journal.write(Event.COMMAND_EXITED, pid=root, how=how, status=told)
    _end_all()
    journal.sign_off("it was told to end" if status is None else "its command ended")


def _start(spec: WardenSpec) -> int:
    """The command, in a session of its own."""
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(me)
        os.setsid()
        for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores some, and so would the command
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(spec.working_directory)
        os.execvpe(spec.command[0], spec.command, spec.environment)
    except OSError as error:
        sys.stderr.write(f"chaoskit: {spec.command[0]} cannot be started: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(_EXIT_NOT_STARTED)


def _reap() -> dict[int, int]:
    """Children that have ended, with their wait statuses."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _end_all() -> None:
    """SIGKILL whatever is below, again and again: somebody may fork meanwhile."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(_LOOK_S)
