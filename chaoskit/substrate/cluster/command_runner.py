"""The command runner of a node: runs the node's command, and ends all its processes with it.

If its launcher ends, it ends them, too. A command may start processes and leave them behind.
Orphans become children of the command runner, as orphans in a container become children of its
first process.

-> ``core/launched_ranks.py``: which variable gives a process its rank. ``stacks/ranks.py`` and
``experiment/injection/ranks_found.py``: how the ranks are used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
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
from chaoskit.substrate.core.command_environment import CommandEnvironment
from chaoskit.substrate.core.launched_ranks import VARIABLES, LaunchedRank, rank_of
from chaoskit.vocabulary import Event

NAME = "ck-command"
#: The signal that makes a command runner look for ranks at once.
LOOK = signal.SIGUSR1
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, LOOK)
_RANKS_S = 0.5  # interval of the search for ranks, which takes 1 ms for 40 processes
_EXIT_NOT_STARTED = 127  # the exit status that shells use
_LOOK_S = 0.002


class CommandSpec(msgspec.Struct, frozen=True):
    """A command of a node. Its output goes to the node's log.

    Attributes:
        command: program and arguments.
        environment: variables of the command besides those of its node.
        node_variables: variables of the node; None for those of the command runner.
        run_directory: directory of the run as the node sees it; the journal is written below it.
        directories: directories of the node that are created before the command starts.
        copies: directory of the node -> its copy, which is made before the command starts. A command
            may write into its working directory, which must be new in each run.
        paths: directory that the plan names -> its copy on this node, which ``command`` names.
    """

    node: str
    command: tuple[str, ...]
    environment: CommandEnvironment
    node_variables: dict[str, str] | None
    working_directory: str
    run_directory: str
    directories: tuple[str, ...] = ()
    copies: dict[str, str] = {}
    paths: dict[str, str] = {}


def run_command(arguments: bytes, sockets: Sequence[socket.socket], parent_pid: int) -> None:
    """Run a command until it ends or SIGTERM arrives: the entry point of the command runner.

    Start and end of the command, and the ranks of its processes, are written to the node's journal.
    The function returns once no process below this one is alive.

    Args:
        arguments: a :class:`CommandSpec` as JSON.
        sockets: unused; every entry point of a supervisor has this parameter.
        parent_pid: pid of the supervisor. If it ends, this process receives SIGTERM.
    """
    spec = msgspec.json.decode(arguments, type=CommandSpec)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(parent_pid, signal.SIGTERM)
    adopt_orphans()
    set_name(NAME)
    journal = Journal(
        Path(spec.run_directory) / "journal", spec.node, role="warden", node=spec.node
    )
    for directory in spec.directories:
        Path(directory).mkdir(parents=True, exist_ok=True)
    for source, copy in spec.copies.items():
        shutil.copytree(source, copy)
    root = _start(spec)
    journal.write(Event.COMMAND_STARTED, pid=root, command=spec.command, paths=spec.paths)
    ranks, status, is_terminated = _Ranks(journal), None, False
    while status is None and not is_terminated:
        signal_info = signal.sigtimedwait(_SIGNALS, _RANKS_S)
        is_terminated = signal_info is not None and signal_info.si_signo == signal.SIGTERM
        ranks.look()  # before processes are reaped, so that ranks that lived for a moment are found
        status = reap().get(root)
    if status is not None:
        how, text = describe_status(status)
        journal.write(Event.COMMAND_EXITED, pid=root, how=how, status=text)
    _end_all()
    journal.sign_off("it received SIGTERM" if status is None else "the command ended")


class _Ranks:
    """Records in the journal which process below the command runner has which rank.

    Launchers pass the rank to their children in environment variables. The harness looks a rank up
    by itself when it injects a fault; this record of another process confirms the target.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._ranks: dict[int, tuple[LaunchedRank, int | None]] = {}  # pid -> rank, start time
        # processes that inherited the variable of a rank, such as data loaders
        self._children: set[int] = set()

    def look(self) -> None:
        """Write to the journal which ranks are gone, and which processes have a new rank."""
        for pid, (rank, ticks) in list(self._ranks.items()):
            if is_ending(pid) or start_ticks(pid) != ticks:
                del self._ranks[pid]
                self._journal.write(Event.RANK_GONE, rank=rank.rank, pid=pid, ticks=ticks)
        below = descendants(os.getpid())
        self._children.intersection_update(below)
        for pid in below:
            if pid not in self._children and not self._is_certain(pid):
                self._judge(pid)

    def _is_certain(self, pid: int) -> bool:
        """Return whether the rank of a process is final.

        A rank from a weaker variable may change when the process executes another program.
        """
        return pid in self._ranks and self._ranks[pid][0].variable == VARIABLES[0]

    def _judge(self, pid: int) -> None:
        """Write the rank of process ``pid`` to the journal, unless it has none or inherited it."""
        rank, ticks = rank_of(variables(pid)), start_ticks(pid)
        if rank is None or self._ranks.get(pid) == (rank, ticks):
            return  # judged again later: between fork and exec a child has its parent's variables
        parent_pid = parent(pid) or 0
        if parent_pid != os.getpid() and rank_of(variables(parent_pid)) == rank:
            if rank.variable == VARIABLES[0]:
                self._children.add(pid)
            return
        self._ranks[pid] = (rank, ticks)
        self._journal.write(
            Event.RANK_FOUND, rank=rank.rank, pid=pid, ticks=ticks, variable=rank.variable
        )


def _start(spec: CommandSpec) -> int:
    """Start the command in a session of its own, and return its pid without waiting.

    If the program cannot be executed, the process ends with status 127 and a line in the log.
    """
    runner_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(runner_pid)
        os.setsid()
        # Python ignores some of these signals, and the command would inherit that
        for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(spec.working_directory)
        node_variables = os.environ if spec.node_variables is None else spec.node_variables
        os.execvpe(spec.command[0], spec.command, spec.environment.on(node_variables))
    except OSError as error:
        sys.stderr.write(f"chaoskit: {spec.command[0]} cannot be started: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(_EXIT_NOT_STARTED)


def _end_all() -> None:
    """SIGKILL all descendants, repeatedly until none is left: a process may fork meanwhile."""
    while below := descendants(os.getpid()):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(_LOOK_S)
