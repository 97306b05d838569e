"""Runs one node's command, and ends everything below it when it ends, or when its launcher does.

A command may start what it likes, and leave it behind: whatever has lost its parent comes to the warden, as it comes to
the first process of a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from chaoskit.journal import Journal
from chaoskit.process.linux import (
    adopt_orphans,
    descendants,
    describe_status,
    die_with_parent,
    is_ending,
    parent,
    reap,
    set_name,
    start_ticks,
    variables,
)
from chaoskit.substrate.core.launched_ranks import VARIABLES, LaunchedRank, rank_of
from chaoskit.vocabulary import Event

NAME = "ck-warden"
#: Has a warden look for ranks at once.
LOOK = signal.SIGUSR1
_HEARD = (signal.SIGCHLD, signal.SIGTERM, LOOK)
_RANKS_S = 0.5  # between two looks for ranks: each takes 1 ms for 40 processes
_EXIT_NOT_STARTED = 127  # as shells say it
_LOOK_S = 0.002


class WardenSpec(msgspec.Struct, frozen=True):
    """A command on a node. What it prints goes to the node's log."""

    node: str
    command: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str
    run_directory: str


def run_warden(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Until the command has ended, or SIGTERM says that it shall. Never returns with a live process below it."""
    spec = msgspec.json.decode(arguments, type=WardenSpec)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    die_with_parent(parent_pid, signal.SIGTERM)
    adopt_orphans()
    set_name(NAME)
    journal = Journal(
        Path(spec.run_directory) / "journal", spec.node, role="warden", node=spec.node
    )
    root = _start(spec)
    journal.write(Event.COMMAND_STARTED, pid=root, command=spec.command)
    ranks, status, is_told = _Ranks(journal), None, False
    while status is None and not is_told:
        heard = signal.sigtimedwait(_HEARD, _RANKS_S)
        is_told = heard is not None and heard.si_signo == signal.SIGTERM
        ranks.look()  # before the dead are reaped: a process that had a rank for a moment is still there
        status = reap().get(root)
    if status is not None:
        how, told = describe_status(status)
        journal.write(Event.COMMAND_EXITED, pid=root, how=how, status=told)
    _end_all()
    journal.sign_off("it was told to end" if status is None else "its command ended")


class _Ranks:
    """Writes down which process below the warden has which rank, as launchers tell it to their children by variables.

    The harness looks that up by itself when it strikes; this is the word of another process on what it struck.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._found: dict[int, tuple[LaunchedRank, int | None]] = {}  # pid -> rank, start time
        self._children: set[int] = (
            set()
        )  # of ranks, such as loaders of data: they inherit the variable

    def look(self) -> None:
        """Write down which processes that had a rank are gone, and which have one now."""
        for pid, (rank, ticks) in list(self._found.items()):
            if is_ending(pid) or start_ticks(pid) != ticks:
                del self._found[pid]
                self._journal.write(Event.RANK_GONE, rank=rank.rank, pid=pid, ticks=ticks)
        below = descendants(os.getpid())
        self._children.intersection_update(below)
        for pid in below:
            if pid not in self._children and not self._is_certain(pid):
                self._judge(pid)

    def _is_certain(self, pid: int) -> bool:
        """Return whether the rank of a process is final: one by a weaker variable may change with its program."""
        return pid in self._found and self._found[pid][0].variable == VARIABLES[0]

    def _judge(self, pid: int) -> None:
        rank, ticks = rank_of(variables(pid)), start_ticks(pid)
        if rank is None or self._found.get(pid) == (rank, ticks):
            return  # not yet, perhaps: between fork and exec a child has the variables of its parent
        above = parent(pid) or 0
        if above != os.getpid() and rank_of(variables(above)) == rank:
            if rank.variable == VARIABLES[0]:
                self._children.add(pid)
            return
        self._found[pid] = (rank, ticks)
        self._journal.write(
            Event.RANK_FOUND, rank=rank.rank, pid=pid, ticks=ticks, variable=rank.variable
        )


def _start(spec: WardenSpec) -> int:
    """The command, in a session of its own."""
    me = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(me)
        os.setsid()
        for signum in (
            signal.SIGINT,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores some, and so would the command
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


def _end_all() -> None:
    """SIGKILL whatever is below, again and again: a process may fork meanwhile."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(_LOOK_S)
