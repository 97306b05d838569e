"""Nodes without agents and coordinator: each runs a command under a command runner.

-> ``cluster/command_runner.py``: the process that runs the command and records its ranks.
``experiment/injection/command_follower.py``: the faults that are injected into a command.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from chaoskit.config import disk_directory
from chaoskit.errors import NodeUnreachable
from chaoskit.rules.log_file import ArrivingFile, ArrivingLog
from chaoskit.substrate.cluster.command_runner import LOOK, CommandSpec
from chaoskit.substrate.cluster.network import Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.without_coordinator import WithoutCoordinator
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.command_environment import CommandEnvironment
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process

_FAREWELL_S = 3.0  # time that a command runner gets to end its processes
#: Name of the directory for checkpoints, below the directory of the run.
_CHECKPOINTS = "checkpoints"


class StartsCommands(Protocol):
    """Protocol of a substrate that starts and ends commands on nodes."""

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """Return the backends of actions on the nodes of a run, without those of its network."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the variables of a node for its command; None for those of its supervisor."""

    def kill(self, node: str) -> None:
        """Kill the container or pod of a node, if it has one. Raises HarnessError if that fails."""

    def start_command(self, network: Network, spec: CommandSpec) -> Process:
        """Start the command of a node, and return the process of its command runner.

        Raises HarnessError if the command runner cannot be started.
        """

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """End these programs of nodes and all processes below them, and wait until they are gone.

        Processes that do not end in time are left, and nothing is raised for them.

        Args:
            programs: each with its node.
            patience_s: time that the programs get to end by themselves.
        """


class BareCluster(WithoutCoordinator, BaseCluster):
    """The nodes of a run of a command. They support the same actions as those of other clusters.

    Operations on processes of a node raise KeyError before its command is started.

    Attributes:
        port: a TCP port that is free on every node.
        interface: name of a node's link to the others.
    """

    def __init__(
        self,
        substrate: StartsCommands,
        network: Network,
        nodes: tuple[str, ...],
        run_directory: Path,
    ) -> None:
        super().__init__(network, nodes, run_directory, substrate.backends, substrate.kill)
        self._substrate = substrate
        self.interface = network.interface
        self.port = network.address[1]
        for listener in network.listeners:
            listener.close()  # no coordinator takes the ports: they become free
        self._runners: dict[str, Process] = {}  # node -> its command runner

    @property
    def checkpoints(self) -> Path | None:
        return self._home / _CHECKPOINTS

    @property
    def paths(self) -> Mapping[str, str]:
        return {}

    @property
    def _copies(self) -> Mapping[str, str]:
        """Directories of nodes, each with the copy that is made of it before a command starts."""
        return {}

    @property
    def _home(self) -> Path:
        """The directory of the run as the processes on its nodes see it."""
        return self.run_directory

    def disk(self, node: str) -> Path:
        return disk_directory(self._home, node)

    def host(self, node: str) -> str:
        """Return the address under which other nodes reach a node."""
        return self._network.host(node)

    def start(
        self,
        node: str,
        command: tuple[str, ...],
        environment: CommandEnvironment,
        directory: str,
    ) -> None:
        """Start ``command`` on ``node``, and return without waiting for its end.

        The directories of the node's disk and for checkpoints are created. Raises HarnessError if
        the command runner cannot be started.
        """
        variables = self._substrate.environment()
        created = [self.disk(node), *([self.checkpoints] if self.checkpoints else [])]
        spec = CommandSpec(
            node,
            command,
            environment,
            None if variables is None else dict(variables),
            directory,
            str(self._home),
            tuple(map(str, created)),
            dict(self._copies),
            dict(self.paths),
        )
        self._runners[node] = self._substrate.start_command(self._network, spec)

    def is_over(self, node: str) -> bool:
        """Return whether the command of ``node`` and all processes that it started have ended.

        Raises HarnessError if the node cannot be reached.
        """
        return self._runners[node].is_gone()

    def log(self, node: str) -> Path:
        """Return the path of the log file with the output of the command of ``node``."""
        return self.run_directory / "log" / f"{node}.log"

    def open_log(self, node: str) -> ArrivingLog:
        return ArrivingFile(self.log(node))

    def node(self, node: str) -> list[Process]:
        """Return the live processes of a node, the command first, without its command runner.

        The list is empty once the command and all that it started have ended.
        """
        runner = self._runners[node]
        return [process for process in runner.kernel.tree(runner) if process != runner]

    def ranks(self, node: str) -> dict[Process, LaunchedRank]:
        """Return the live processes of a node that were started with a rank, and their ranks."""
        runner = self._runners[node]
        return runner.kernel.launched_ranks(runner)

    def root(self, node: str) -> Process:
        return self._runners[node]

    def heard(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: the supervisors of this host report nothing."""
        return contextlib.nullcontext()

    def look_for_ranks(self, node: str) -> None:
        """Make the command runner of ``node`` record ranks now instead of at its next interval.

        The call does not wait for that, and does nothing if the runner is gone.
        """
        _send_signal(self._runners[node], LOOK)

    def why_aborted(self) -> str:
        return ""  # the command is the user's only for the run

    def why_spared(self, nodes: Sequence[str], actions: Collection[type[Action]]) -> str:
        return ""  # the nodes exist for the run alone

    def end(self) -> None:
        """End every process of the run, and wait until all are gone. Its network is removed.

        Command runners have 3 s to end their processes. Then all are killed.
        """
        self._release()
        for runner in self._runners.values():
            _send_signal(runner, signal.SIGTERM)
        with contextlib.ExitStack() as ended:
            ended.callback(self._close_backends)
            ended.callback(self._network.close)
            self._substrate.end(self._runners.items(), _FAREWELL_S)


def _send_signal(process: Process, signum: int) -> None:
    """Send a signal to a process, unless it or the supervisor of its node is gone."""
    with contextlib.suppress(ProcessLookupError, NodeUnreachable):
        process.signal(signum)
