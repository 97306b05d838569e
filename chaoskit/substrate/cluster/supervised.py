"""The base of substrates that have a supervisor on each node: how their runs begin and end.

-> ``supervisor/programs.py``: how a program is forked, restarted and ended. ``undo/guard.py``: what
ends a run whose launcher was killed. ``cluster/job_cluster.py``: a run while it goes on.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.agent.agent import AgentSpec
from chaoskit.config import RunConfig
from chaoskit.coordinator.server import EXIT_OVER, CoordinatorSpec
from chaoskit.errors import HarnessError, NodeUnreachable, Refused
from chaoskit.plaintext import tell_on_stderr
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.command_runner import CommandSpec
from chaoskit.substrate.cluster.job_cluster import JobCluster, attach
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.node_files import HostFiles, NodeFiles
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import ExternalCommands
from chaoskit.substrate.core.processes import HOST, Kernel, Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.messages import Program
from chaoskit.substrate.undo import UndoLog, sweep
from chaoskit.wire.coordinator_files import CoordinatorAddress
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import ObserverHello

_RESTARTS = 16  # limit for a coordinator that ends before its job


class SupervisedSubstrate:
    """Base of substrates. Each subclass provides supervisors, networks, and backends of actions.

    Its runs have stations: each node, and the coordinator (``COORDINATOR``).

    The constructor undoes what earlier runs left behind.

    Attributes:
        undo: log of the changes that must be undone if this process is killed.
        tell: shows a line to the user, such as what is waited for.
        external_commands: carries out commands on machines from outside; None to run them in this
            process.
        copies: directories of a command that are copies on this machine: path on the machine of
            the user -> path here. Empty for a run of this machine's own user.
        test: pytest name of the test of the next run if that test is in another process; "" for the
            test of this process.
        files: the files of runs on the nodes.
    """

    name = ""
    files: NodeFiles = HostFiles()

    def __init__(self) -> None:
        sweep()  # undo the leftovers of runs that were killed
        self.undo = UndoLog()
        self.tell: Callable[[str], None] = tell_on_stderr
        self.external_commands: ExternalCommands | None = None
        self.test = ""
        self.copies: Mapping[str, str] = {}

    # -- operations that differ between substrates -------------------------------------------------

    def warm_up(self) -> None:
        """Start the supervisors that serve any run, unless they run already.

        Their imports take seconds. Raises HarnessError if one does not start, and BadInput if
        their image cannot be used.
        """
        raise NotImplementedError

    def link(self, station: str) -> SupervisorLink:
        """Return the link to the supervisor of a node or the coordinator.

        Raises NodeUnreachable if there is none any more.
        """
        raise NotImplementedError

    def kernel(self, station: str) -> Kernel:
        """Return the kernel that runs the processes of a node or the coordinator."""
        return HOST

    def network(self, nodes: Sequence[str], port: int) -> Network:
        """Create the network of a run, and return it.

        Raises BadInput if the port is in use on this host. Raises HarnessError if the network
        cannot be created, or the port is in use in the network.

        Args:
            nodes: names of all nodes that the run may have.
            port: port of the coordinator; 0 for a free one.
        """
        raise NotImplementedError

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """Return the backends of actions on the nodes of a run, without those of its network."""
        raise NotImplementedError

    def kill(self, node: str) -> None:
        """Kill the container or pod of a node, if it has one.

        Raises HarnessError if that fails.
        """

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place here, before its start.

        The base accepts every run.
        """

    def why_not(self, action: type[Action]) -> str:
        """Return the reason why nodes of this substrate do not support an action; "" if they do."""
        raise NotImplementedError

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None] | None:
        """Return a function that shows events of a run on the platform; None if none does."""
        return None

    def environment(self) -> Mapping[str, str] | None:
        """Return the variables of a node for its command; None for those of its supervisor."""
        return os.environ

    def job_cluster(self, *arguments: Any) -> JobCluster:
        """Return the cluster of a run of a job; a subclass may return a class of its own.

        Args:
            arguments: those of :class:`JobCluster` after the substrate, in their order.
        """
        return JobCluster(self, *arguments)

    def close(self) -> None:
        """End everything that this substrate started, and undo the open entries of its undo log."""
        self.undo.close()

    # -- runs --------------------------------------------------------------------------------------

    def launch(
        self,
        config: RunConfig,
        run_directory: Path,
        *,
        port: int = 0,
        heartbeat_s: float = 0.0,
        replacements: int = 0,
        injection: InjectionDoor | None = None,
    ) -> JobCluster:
        """Start the coordinator and the agents of a run, and return its cluster.

        Args:
            port: port of the coordinator; 0 for a free one.
            heartbeat_s: least interval between heartbeats of a node that the coordinator forwards;
                0 for all.
            replacements: expected number of replacements for lost nodes; the base ignores it.
            injection: endpoint at which processes of the run reach the harness.

        Raises:
            BadInput: if ``port`` is in use, or the job's directory cannot be used.
            HarnessError: if coordinator, agents or their network do not start.
        """
        self.warm_up()
        nodes, token = node_names(config.nodes), secrets.token_hex(16)
        network = self.network(node_names(config.nodes_max), port)
        hello, agents = ObserverHello(heartbeat_s), dict[str, Process]()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(network.close)
            cleanup.callback(self.files.collect, run_directory)
            coordinator = self._start_coordinator(network, config, token, run_directory)
            # else the supervisor would restart a coordinator that fails at its start
            cleanup.callback(lambda: self.end([(COORDINATOR, coordinator), *agents.items()], 0.0))
            try:
                observer = cleanup.enter_context(attach(network, token, hello))
            except (OSError, Refused) as error:
                log = run_directory / "log" / "coordinator.log"
                raise HarnessError(
                    f"the coordinator ended while it started ({error}): see {log}"
                ) from error
            for node in nodes:
                agents[node] = self.start_agent(network, node, token, run_directory, injection)
            start_again = partial(self.coordinator_again, network, config, token, run_directory)
            cluster = self.job_cluster(
                network,
                observer,
                token,
                coordinator,
                agents,
                run_directory,
                hello,
                injection,
                start_again,
            )
            cleanup.pop_all()
            return cluster

    def _start_coordinator(
        self,
        network: Network,
        config: RunConfig,
        token: str,
        run_directory: Path,
        lost: Iterable[str] = (),
    ) -> Process:
        """Start a coordinator with the listeners of ``network``, which are closed here.

        Return its process. Raises HarnessError if it cannot be started, and BadInput if the job's
        directory cannot be used.

        Args:
            lost: nodes that were lost together with an earlier coordinator.
        """
        home = str(self.files.home(run_directory))
        entry = "chaoskit.coordinator.server:run_coordinator"
        try:
            arguments = msgspec.json.encode(
                CoordinatorSpec(self.files.localize_config(config), token, home, tuple(lost))
            )
            self.files.prepare(COORDINATOR, run_directory)
            link = self.link(COORDINATOR)
            program = Program(
                entry, arguments, COORDINATOR, home, _RESTARTS, EXIT_OVER, link.clock_ahead_ns()
            )
            return link.start(program, network.listeners, network.namespace(COORDINATOR))
        finally:
            for listener in network.listeners:
                listener.close()

    def coordinator_again(
        self,
        network: Network,
        config: RunConfig,
        token: str,
        run_directory: Path,
        nodes: Sequence[str],
    ) -> Process | None:
        """Start the coordinator of a run on another machine if its own is lost.

        Return its process, or None if the machine is not lost or there is no other one. On a
        machine that is still there the supervisor restarts the coordinator. Raises HarnessError if
        no coordinator can start.

        Args:
            nodes: the nodes that must reach it.
        """
        return None

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of a run, after the files that it needs, and return its process.

        Raises HarnessError if it cannot be started.
        """
        self.files.prepare(node, run_directory)
        host, home = network.host(node), str(self.files.home(run_directory))
        door = self.files.door(node, injection)
        launched = workers_started(run_directory, node)
        coordinator = CoordinatorAddress(network.address, network.store)
        spec = AgentSpec(node, host, coordinator, token, home, door, launched)
        link, entry = self.link(node), "chaoskit.agent.agent:run_agent"
        program = Program(
            entry, msgspec.json.encode(spec), node, home, clock_ahead_ns=link.clock_ahead_ns()
        )
        return link.start(program, namespace=network.namespace(node))

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Return a cluster of nodes on which commands can be started.

        The nodes see all directories of this host, so ``needs`` is not used. Raises HarnessError if
        supervisors or the network do not start.
        """
        self.warm_up()
        names = node_names(nodes)
        return BareCluster(self, self.network(names, 0), names, run_directory)

    def start_command(self, network: Network, spec: CommandSpec) -> Process:
        """Start the command of a node, and return the process of its command runner.

        Raises HarnessError if the supervisor cannot start it.
        """
        entry, arguments = (
            "chaoskit.substrate.cluster.command_runner:run_command",
            msgspec.json.encode(spec),
        )
        link = self.link(spec.node)
        program = Program(
            entry, arguments, spec.node, spec.run_directory, clock_ahead_ns=link.clock_ahead_ns()
        )
        return link.start(program, namespace=network.namespace(spec.node))

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """SIGKILL programs that do not end by themselves, and all processes below them.

        All supervisors do this at the same time. The call returns when they are done, or gone.
        Raises HarnessError if one does not answer.

        Args:
            programs: each with its node or ``COORDINATOR``.
            patience_s: time that the programs get to end by themselves.
        """
        by_link: dict[SupervisorLink, list[Process]] = {}
        for station, process in programs:
            # a supervisor ends its processes by itself when its stream ends
            with contextlib.suppress(NodeUnreachable):
                by_link.setdefault(self.link(station), []).append(process)
        pending = []
        for link, processes in by_link.items():
            with contextlib.suppress(NodeUnreachable):
                pending.append((link, link.begin_end(processes, patience_s)))
        for link, number in pending:
            with contextlib.suppress(NodeUnreachable):
                link.finish(number)


def workers_started(run_directory: Path, node: str) -> int:
    """Return the number of workers that a node has had in a run, from the numbers of their logs.

    It is 0 if there are none. Workers of earlier agents of the node count as well.
    """
    logs = (run_directory / "log").glob(f"{glob.escape(node)}.*.log")
    numbers = [path.name.removeprefix(f"{node}.").removesuffix(".log") for path in logs]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def node_names(count: int) -> tuple[str, ...]:
    """Return the names of the nodes of a run: ``node0`` and so on."""
    return tuple(f"node{number}" for number in range(count))
