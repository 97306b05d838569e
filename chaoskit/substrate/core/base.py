"""Interfaces of a substrate and of the clusters that it makes for experiments.

-> ``cluster/supervised.py``: the base of the built-in substrates. ``cluster/job_cluster.py`` and
``cluster/bare.py``: the clusters of a job and of a command. ``registry.py``: substrates by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chaoskit.config import RunConfig
from chaoskit.rules.log_file import ArrivingLog
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.command_environment import CommandEnvironment
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.launched_ranks import LaunchedRank
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import Message


class Cluster(Protocol):
    """The nodes of one running job, seen by an observer of its coordinator.

    Operations on a node raise HarnessError if the node does not answer.

    Attributes:
        address: host and port of the coordinator's listener for agents and observers.
        token: secret that every connection to the coordinator must prove.
        store_port: port of the coordinator's store.
        nodes: names of all nodes that have been started, lost ones included.
    """

    address: tuple[str, int]
    token: str
    store_port: int
    nodes: tuple[str, ...]

    def receive(self, timeout_s: float) -> Any | None:
        """Return the next message of the coordinator, or None after ``timeout_s``.

        The call takes longer while another coordinator takes over. Raises ConnectionError once the
        job is over, or if no coordinator can be reached any more.
        """

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message may be there.

        :meth:`receive` may change it.
        """

    def send(self, message: Message) -> None:
        """Send a message to the current coordinator, or to the next one if it has ended.

        Raises OSError if the connection fails for another reason than its end.
        """

    def pace(self, heartbeat_s: float) -> None:
        """Limit how often the coordinator forwards heartbeats of a node while nothing else happens.

        Args:
            heartbeat_s: least interval between two of them; 0 forwards all.
        """

    def node(self, node: str) -> list[Process]:
        """Return the live processes of a node: agent, zygote, keeper, workers, and their children.

        The list has this order. It is empty if the agent is gone.
        """

    def root(self, node: str) -> Process:
        """Return the agent of a node, which is the ancestor of all processes of the node."""

    def worker(self, node: str, pid: int) -> Process:
        """Return the process of a worker as it was when the worker reported ready.

        If the worker has not reported yet, ``pid`` is looked up now. The process has no start time
        (``ticks`` is None) if the node has no such process.
        """

    def heard(self) -> AbstractContextManager[None]:
        """Return a context in which the running event loop receives reports of nodes."""

    def coordinator(self) -> Process:
        """Return the process of the current coordinator."""

    def lose(self, node: str) -> None:
        """End everything of a node at once. Raises HarnessError if a process does not end.

        A network of the node's own is cut first, without a reset. Then all processes are killed,
        and the memory that they keep is lost. The call returns when none of them lives.
        """

    def together(self, node: str) -> tuple[str, ...]:
        """Return the names of the nodes on the machine of ``node``, itself included.

        All of them are lost with the machine.
        """

    def dropped(self, node: str) -> int:
        """Return the number of dropped packets from or to a lost node.

        It is 0 where packets are not counted.
        """

    def restart(self, node: str) -> None:
        """Start an agent again under the name of a lost node.

        Raises HarnessError if a process of the node still lives, or no agent starts. The agent is
        another incarnation of the node, with empty memory and a working network.
        """

    async def replace(self, node: str) -> None:
        """Start another node under the name of a node that the coordinator considers lost.

        The event loop keeps running: it takes seconds where a machine must be allocated first.
        Raises HarnessError or BadInput if no other node can start, and HarnessError if a process of
        the lost node still lives.
        """

    def provide(self, count: int) -> None:
        """Start nodes until ``count`` have been started, lost ones included.

        Raises HarnessError if that is impossible.
        """

    def apply(self, node: str, action: Action) -> Applied:
        """Apply an action to a node, and return the handle that counts its effects and lifts it.

        Its undo entry is written first.

        Args:
            action: of :mod:`chaoskit.substrate.core.actions`, or a change of
                :mod:`chaoskit.substrate.core.traffic`.

        Raises:
            ProcessLookupError: if the node is gone.
            HarnessError: if the action cannot be carried out.
        """

    def round_trips_ms(
        self, source: str, target: str, count: int = 1, timeout_s: float = 1.0
    ) -> tuple[float, ...]:
        """Send ``count`` echoes between two nodes and return the round trips of those answered.

        The echoes travel from ``source`` and back, beside the job's own traffic. An echo without an
        answer within ``timeout_s`` is left out. Raises HarnessError if the nodes share one network,
        or no socket for echoes can be opened.
        """

    def disk(self, node: str) -> Path:
        """Return the path of the directory that the job writes to on a node."""

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        """Start to measure round trips between two nodes, and return the probe that holds them.

        It measures until it is closed. An echo without an answer within ``timeout_s`` is lost.
        Raises HarnessError as :meth:`round_trips_ms`.
        """

    def end(self) -> None:
        """End every process of the cluster, and wait until all are gone.

        Its network is removed, and its journals and logs are complete afterwards. Raises
        HarnessError if a process does not end.
        """


class CommandCluster(Cluster, Protocol):
    """Nodes that commands are started on, without coordinator and agents.

    Operations that need a coordinator raise HarnessError; ``address``, ``token`` and ``store_port``
    are empty or 0.

    Attributes:
        port: a TCP port that is free on every node.
        interface: the network interface of a node; "" for any.
    """

    port: int
    interface: str

    @property
    def checkpoints(self) -> Path | None:
        """The directory for checkpoints, the same on all nodes; None if the nodes share none."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Directory of this host -> its copy on each node, where nodes do not see this host's."""

    def ranks(self, node: str) -> Mapping[Process, LaunchedRank]:
        """Return the live processes of a node that were started with a rank, and their ranks.

        Raises HarnessError if the node cannot be reached.
        """

    def host(self, node: str) -> str:
        """Return the address under which other nodes reach a node."""

    def start(
        self,
        node: str,
        command: tuple[str, ...],
        environment: CommandEnvironment,
        directory: str,
    ) -> None:
        """Start ``command`` on ``node``, and return without waiting for its end.

        Its output goes to the node's log. A program that cannot be executed ends with exit status
        127. Raises HarnessError if the node cannot start any process.

        Args:
            command: program and arguments. Their paths are those of the node.
            environment: variables of the command besides those of its node.
            directory: working directory of the command on the node.
        """

    def is_over(self, node: str) -> bool:
        """Return whether the command of ``node`` and all processes that it started have ended.

        Its journal and its log are complete then. False is returned for a node whose end is not
        proved. Raises HarnessError if its records cannot be stored here.
        """

    def log(self, node: str) -> Path:
        """Return the path of the file that holds the output of the node's command."""

    def open_log(self, node: str) -> ArrivingLog:
        """Return the same output from its beginning, for one reader."""

    def look_for_ranks(self, node: str) -> None:
        """Make ``node`` write to its journal now which of its processes have ranks.

        It does so twice a second otherwise. Nothing happens if its command is over.
        """

    def why_aborted(self) -> str:
        """Return why the user wants the run to end now; "" while it may go on."""

    def why_spared(self, nodes: Sequence[str], actions: Collection[type[Action]]) -> str:
        """Return why a fault may not strike nodes now; "" if it may, and is about to do so.

        Args:
            nodes: the nodes of the ranks that the fault names, that of its own rank first.
            actions: the kinds of actions that the fault applies.
        """


@dataclass(frozen=True, slots=True)
class Needs:
    """Directories of this host that must be available to processes on a node.

    Attributes:
        read: directories that are read.
        written: directories that are written.
    """

    read: tuple[Path, ...] = ()
    written: tuple[Path, ...] = ()


NOTHING = Needs()


class Substrate(Protocol):
    """Factory of clusters that is kept over many experiments.

    Attributes:
        undo: log of what must be undone if this process is killed.
    """

    name: str
    undo: UndoLog

    def launch(
        self,
        config: RunConfig,
        run_directory: Path,
        *,
        port: int = 0,
        heartbeat_s: float = 0.0,
        replacements: int = 0,
        injection: InjectionDoor | None = None,
    ) -> Cluster:
        """Start the coordinator and the agents of a run, and return their cluster.

        Journals and logs go below ``run_directory``.

        Args:
            port: port of the coordinator; 0 for a free one.
            heartbeat_s: least interval of the heartbeats of a node that the cluster's observer
                receives; 0 for all. See :class:`chaoskit.wire.messages.ObserverHello`.
            replacements: expected number of replacements for lost nodes, so that places can be
                prepared.
            injection: endpoint at which the harness of a run with faults listens to workers and
                checkpoint daemons. None in production.

        Raises:
            BadInput: if the port, the device, the image or the directory of the job cannot be used.
            HarnessError: if coordinator, agents or their network do not start.
        """

    def require(self, demand: RunDemand) -> None:
        """Check that a run can take place here, before anything of it is created.

        Raises BadInput if an option or the plan asks for something that is not available here, and
        HarnessError if the substrate itself is not usable.
        """

    def why_not(self, action: type[Action]) -> str:
        """Return why an action of this kind cannot be applied to nodes here; "" if it can.

        The answer comes from a trial where one is possible.
        """

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None] | None:
        """Return a function that shows events of a run on the platform of the nodes.

        None is returned where the platform has no such view. The function is called on another
        thread. It does not block and raises nothing.
        """

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> CommandCluster:
        """Return a cluster of nodes that commands can be run on, without coordinator and agents.

        Raises HarnessError if the substrate runs no commands or the nodes do not start, and
        BadInput if the image or a directory cannot be used.

        Args:
            nodes: number of nodes.
            needs: directories of this host that the command needs there, besides Python's and the
                run's.
        """

    def close(self) -> None:
        """End everything that this substrate started, and undo what it changed."""
