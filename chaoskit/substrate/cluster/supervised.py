"""What substrates with a supervisor on each node have in common: how runs begin and end."""

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
from chaoskit.errors import HarnessError, Refused
from chaoskit.plaintext import tell_on_stderr
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.command_runner import WardenSpec
from chaoskit.substrate.cluster.job_cluster import JobCluster, attach
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import Errands
from chaoskit.substrate.core.processes import HOST, Kernel, Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.messages import Program
from chaoskit.substrate.undo import UndoLog, sweep
from chaoskit.wire.coordinator_files import CoordinatorAddress
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import ObserverHello

_RESTARTS = 16  # of a coordinator that ends before its job


class SupervisedSubstrate:
    """Base of substrates: each says where its supervisors are, how nodes reach each other, what can be done to them.

    Attributes:
        undo: what must be put back if this process is killed.
        tell: shows people a line, such as what is waited for.
        errands: has done what is done to machines from outside; None where nothing is.
        test: the test of the next run, as pytest names it, where that is another process; "" for that of this one.
    """

    name = ""

    def __init__(self) -> None:
        sweep()  # what runs that were killed have left behind
        self.undo = UndoLog()
        self.tell: Callable[[str], None] = tell_on_stderr
        self.errands: Errands | None = None
        self.test = ""

    # -- what each substrate has of its own -----------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start what is not there yet and serves any run: imports take seconds."""
        raise NotImplementedError

    def link(self, station: str) -> SupervisorLink:
        """The supervisor that starts what belongs to a node, or to the coordinator."""
        raise NotImplementedError

    def kernel(self, station: str) -> Kernel:
        """The kernel that knows the processes of a node, or the coordinator's."""
        return HOST

    def network(self, nodes: Sequence[str], port: int) -> Network:
        """The network of one run. Raises BadInput if the port is in use."""
        raise NotImplementedError

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """What carries out actions on the nodes of a run, beside its network."""
        raise NotImplementedError

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place here, before anything of it is made. Raises BadInput, HarnessError."""

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes from here; "" if it can."""
        raise NotImplementedError

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None] | None:
        """Return what shows events of a run to people that look at the platform; None where nothing does."""
        return None

    def environment(self) -> Mapping[str, str]:
        """What a command finds there, if nothing tells it more."""
        return os.environ

    def seen_there(self, config: RunConfig) -> RunConfig:
        """A configuration as the processes of a run find what it names."""
        return config

    def home(self, run_directory: Path) -> Path:
        """The directory of a run as its processes see it."""
        return run_directory

    def prepare(self, station: str, run_directory: Path) -> None:
        """Have what the programs of a run need where a node is, or the coordinator."""

    def collect(self, run_directory: Path) -> None:
        """Have all journals and logs of a run here. Nothing of it runs any more."""

    def door(self, station: str, injection: InjectionDoor | None) -> InjectionDoor | None:
        """Where processes of a node find what listens to them for the harness."""
        return injection

    def job_cluster(self, *arguments: Any) -> JobCluster:
        return JobCluster(self, *arguments)

    def bare_cluster(self, *arguments: Any) -> BareCluster:
        return BareCluster(self, *arguments)

    def close(self) -> None:
        """End everything that this substrate started."""
        self.undo.close()

    # -- runs -----------------------------------------------------------------------------------------------------

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
        """Start coordinator and agents.

        Raises:
            BadInput: if ``port`` is in use. HarnessError: if they do not start.
        """
        self.warm_up()
        nodes, token = node_names(config.nodes), secrets.token_hex(16)
        network = self.network(node_names(config.nodes_max), port)
        hello, agents = ObserverHello(heartbeat_s), dict[str, Process]()
        with contextlib.ExitStack() as undone:
            undone.callback(network.close)
            undone.callback(self.collect, run_directory)
            coordinator = self._start_coordinator(network, config, token, run_directory)
            # the supervisor would start a coordinator that ends at its start again and again
            undone.callback(lambda: self.end([(COORDINATOR, coordinator), *agents.items()], 0.0))
            try:
                observer = undone.enter_context(attach(network, token, hello))
            except (OSError, Refused) as error:
                log = run_directory / "log" / "coordinator.log"
                raise HarnessError(
                    f"the coordinator ended while it started ({error}): see {log}"
                ) from error
            for node in nodes:
                agents[node] = self.start_agent(network, node, token, run_directory, injection)
            again = partial(self.coordinator_again, network, config, token, run_directory)
            made = self.job_cluster(
                network,
                observer,
                token,
                coordinator,
                agents,
                run_directory,
                hello,
                injection,
                again,
            )
            undone.pop_all()
            return made

    def _start_coordinator(
        self,
        network: Network,
        config: RunConfig,
        token: str,
        run_directory: Path,
        lost: Iterable[str] = (),
    ) -> Process:
        home, entry = str(self.home(run_directory)), "chaoskit.coordinator.server:run_coordinator"
        try:
            arguments = msgspec.json.encode(
                CoordinatorSpec(self.seen_there(config), token, home, tuple(lost))
            )
            self.prepare(COORDINATOR, run_directory)
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
        """Start the coordinator of a run on another machine, if the one that it was on is lost; None if it is not, or
        there is no other one. Its supervisor starts it again where that is there still.

        Args:
            nodes: that are to find it.
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
        """Start an agent of a run. Gives its process."""
        self.prepare(node, run_directory)
        host, home, door = (
            network.host(node),
            str(self.home(run_directory)),
            self.door(node, injection),
        )
        started = workers_started(run_directory, node)
        coordinator = CoordinatorAddress(network.address, network.store)
        spec = AgentSpec(node, host, coordinator, token, home, door, started)
        link, entry = self.link(node), "chaoskit.agent.agent:run_agent"
        program = Program(
            entry, msgspec.json.encode(spec), node, home, clock_ahead_ns=link.clock_ahead_ns()
        )
        return link.start(program, namespace=network.namespace(node))

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Nodes on which commands can be started, and nothing runs yet. They see all directories of this host."""
        self.warm_up()
        names = node_names(nodes)
        return self.bare_cluster(self.network(names, 0), names, run_directory)

    def start_command(self, network: Network, spec: WardenSpec) -> Process:
        """Start a node's command. Gives the process of its warden."""
        entry, arguments = (
            "chaoskit.substrate.cluster.command_runner:run_warden",
            msgspec.json.encode(spec),
        )
        program = Program(entry, arguments, spec.node, spec.run_directory)
        return self.link(spec.node).start(program, namespace=network.namespace(spec.node))

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """SIGKILL programs that do not end by themselves, and everything below them; of all supervisors at once.

        Args:
            programs: with the node, or ``COORDINATOR``, to which each belongs.
        """
        places: dict[SupervisorLink, list[Process]] = {}
        for station, process in programs:
            with contextlib.suppress(
                SupervisorGone
            ):  # it ends all that it has started when its stream does
                places.setdefault(self.link(station), []).append(process)
        begun = []
        for link, inside in places.items():
            with contextlib.suppress(SupervisorGone):
                begun.append((link, link.begin_end(inside, patience_s)))
        for link, number in begun:
            with contextlib.suppress(SupervisorGone):
                link.finish(number)


def workers_started(run_directory: Path, node: str) -> int:
    """How many workers a node has had in a run: each has left a log, whichever agent it had."""
    logs = (run_directory / "log").glob(f"{glob.escape(node)}.*.log")
    numbers = [path.name.removeprefix(f"{node}.").removesuffix(".log") for path in logs]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)


def node_names(count: int) -> tuple[str, ...]:
    """Names of a run's nodes."""
    return tuple(f"node{number}" for number in range(count))
