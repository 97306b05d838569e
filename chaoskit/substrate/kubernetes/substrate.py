"""The substrate ``kubernetes``: the nodes of runs on the pods of a session.

-> kubernetes/session.py creates and deletes the objects; kubernetes/pods/pods.py creates and
replaces the pods.
-> substrate/cluster/node_files.py and supervised.py: how agents and coordinator start in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, HarnessError, NodeUnreachable
from chaoskit.process.linux import current_test
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.node_files import RemoteFiles, copied_directories
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate, node_names
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import ExternalCommands, LocalCommands
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.backends import PodApi
from chaoskit.substrate.kubernetes.command_cluster import PodCommandCluster
from chaoskit.substrate.kubernetes.machine_faults import MachineFaults
from chaoskit.substrate.kubernetes.machine_pods import SessionMachinePods
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import MACHINE_ACTIONS, POD_ACTIONS
from chaoskit.substrate.kubernetes.pods.manifests import (
    FILES,
    STANDBY,
    world_annotations,
    world_labels,
)
from chaoskit.substrate.kubernetes.pods.network import PodNetwork, why_not_in_pods
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.substrate.kubernetes.preflight import FirstRefusal, Preflight, require_possible
from chaoskit.substrate.kubernetes.run_pods import RunPods
from chaoskit.substrate.kubernetes.session import Session
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.supervisor.remote_node import (
    BackendAway,
    KernelAway,
    supported_actions,
    why_not,
)
from chaoskit.substrate.supervisor.sources import Source
from chaoskit.wire.coordinator_files import COORDINATOR_LOG, CoordinatorAddress, address_file
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import NodeLost, Plan

_LOOK_S = 0.25  # interval of checks; a coordinator sends 20 messages a second
_TIDY_S = 5.0


class KubernetesSubstrate(SupervisedSubstrate):
    """A substrate that keeps a pod for the coordinator and for each node from run to run.

    Raises:
        BadInput: if the options cannot be used.
    """

    name = "kubernetes"
    #: The numerical results of runs are those of another machine's processor.
    is_elsewhere = True
    files: RemoteFiles

    def __init__(self, options: KubernetesOptions) -> None:
        options.require()
        super().__init__()
        self.files = RemoteFiles(Path(FILES), self.link, self.links)
        self._options = options
        self._session: Session | None = None
        self._packed_copies: dict[str, Source] = {}
        self._preflight = Preflight(
            options, template.read(options.template) if options.template else {}
        )
        self._nodes_refusal = FirstRefusal()

    def require(self, demand: RunDemand) -> None:
        """Raise BadInput or HarnessError if a run cannot take place.

        A driver checks nothing: its client has done that, with more rights.
        """
        if self._options.driven is None:
            session = self._session
            self._preflight.require_run(demand, session.name if session is not None else "")

    def warm_up(self) -> None:
        """Ensure that there is a session with a pod for the coordinator.

        A session that is over is replaced. Raises BadInput or HarnessError if the cluster does not
        admit one, or the pod does not run.
        """
        if self._session is not None:
            self._session.pods.find_silent()
            if self._session.is_over():
                self._session.close()
                self._session = None
        if self._session is None:
            if self._options.driven is None:
                self._preflight.require_session()
            with self._preflight.refusal.remembered():
                self._session = Session(self._options, self.undo, self._tell)
            self._preflight.note_made()
        self._session.pods.settle_in()
        self._session.pods.ensure_pods([COORDINATOR])

    def _tell(self, line: str) -> None:
        self.tell(line)  # looked up at each call: a driver sets it later

    def link(self, station: str) -> SupervisorLink:
        if (link := self._pod(station).link) is None:
            raise NodeUnreachable(f"the pod of {station} is gone")
        return link

    def links(self) -> Mapping[str, SupervisorLink]:
        """Return the links to the existing supervisors, by station.

        A station is ``COORDINATOR``, the name of a node, or that of a standby.
        """
        session = self._session
        pods = session.pods.all() if session is not None else ()
        return {pod.station: pod.link for pod in pods if pod.link is not None}

    def kernel(self, station: str) -> KernelAway:
        return self._pod(station).kernel

    def launch(
        self, config: RunConfig, run_directory: Path, *, replacements: int = 0, **options: Any
    ) -> JobCluster:
        """Start coordinator and agents in pods that stay, and return their cluster.

        Args:
            replacements: number of pods that stand by, to take the place of lost ones.
            options: further options of :meth:`chaoskit.substrate.core.base.Substrate.launch`.

        Raises:
            BadInput: if the cluster or the image cannot be used.
            HarnessError: if pods, the coordinator or agents do not start.
        """
        require_possible(RunDemand(config.nodes_max, device=config.device))
        standbys = [f"{STANDBY}{number}" for number in range(replacements)]
        self._ensure_stations([*node_names(config.nodes_max), *standbys])
        try:
            return super().launch(config, run_directory, **options)
        except BadInput:
            raise
        except HarnessError:
            needed = map(self._pods.get, (COORDINATOR, *node_names(config.nodes)))
            self._pods.require_there([pod for pod in needed if pod is not None])
            raise

    def _ensure_stations(self, stations: Sequence[str]) -> None:
        """Ensure that there is a session with a pod for each of these stations.

        Standbys that are not among them are dropped. Raises BadInput or HarnessError if a pod
        cannot be created, or does not run.
        """
        self.warm_up()
        self._pods.drop_standbys(beyond=stations)
        with self._nodes_refusal.remembered(len(stations)):
            self._pods.ensure_pods(stations)
        self._nodes_refusal.note_success()
        self._pods.forget_disrupted()

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of a run, in another pod if the node's own is lost.

        Return its process. Raises BadInput or HarnessError if the pod or the agent does not start.
        """
        if not self._pod(node).lives():
            self.files.settle(node, run_directory)
            self._pods.replace(node)
        return super().start_agent(network, node, token, run_directory, injection)

    def why_ended(self) -> str:
        """Return the event that has ended the session from outside, in words, or "".

        It is "" if no such event is proved, or a driver holds the session. A refusal of the API
        server to give the reason is returned in its place.
        """
        return (
            "" if self._session is None or self._session.is_driven else self._session.explain_end()
        )

    async def ensure_pod(self, node: str, run_directory: Path) -> None:
        """Ensure that a node has a live pod, while the event loop goes on.

        Raises:
            BadInput, HarnessError: if its pod is ending and has not ended yet, or no other one can
                be created now.
        """
        if (pod := self._pods.get(node)) is not None and pod.lives():
            if pod.leaves():
                raise HarnessError(f"the pod of {node} is being deleted, and has not ended yet")
            return
        if pod is not None:
            self.files.settle(node, run_directory)
            pod.note_end()
            pod.disconnect()  # before another thread goes on, because the loop may read the stream
        run_over = threading.Event()
        try:
            await asyncio.to_thread(self._replace_pod, node, pod, run_over.is_set)
        finally:
            run_over.set()

    def _replace_pod(self, node: str, former: Pod | None, is_run_over: Callable[[], bool]) -> None:
        """Delete the former pod of a node, and give the node another one with the job's directory.

        Raises ApiError, BadInput or HarnessError, also if the run is over meanwhile.
        """
        if former is not None:
            # no agent starts while processes of the former pod may run
            self._pods.kill(former, is_run_over)
        # sending a large job takes time, so it is done before the pod is the node's
        self._pods.replace(node, is_run_over, self.files.store_source)

    def label_world(self, plan: Plan, nodes: Sequence[str], run_directory: Path) -> None:
        """Queue labels and annotations for the pods of a run's nodes.

        They show the ranks in the generation of ``plan``, and the test of the run.
        """
        ranks: dict[str, list[int]] = {node: [] for node in nodes}
        for member in plan.members:
            ranks.setdefault(member.node, []).append(member.rank)
        run, test = run_directory.name, self._test()
        for node, ranks_there in ranks.items():
            annotations = world_annotations(run, test, ranks_there, plan.generation)
            self._pods.label(node, world_labels(run, ranks_there, plan.generation), annotations)

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None]:
        """Return a function that queues events of a run as Events about the Job of the session."""
        run, test = run_directory.name, self._test()

        def write(event: RunEvent) -> None:
            if (session := self._session) is not None:
                session.write_event(event, run, test)

        return write

    def _test(self) -> str:
        """Return the pytest name of the run's test, which the client of a driver names, or ""."""
        return self.test or current_test()

    @property
    def run_pods(self) -> RunPods:
        """The pods of the session during a run. The substrate must be warm."""
        return RunPods(self._pods, self._tell)

    def _pod(self, station: str) -> Pod:
        """Return the pod of a station. Raises NodeUnreachable if it has none any more."""
        return self.run_pods.pod(station)

    @property
    def _warm_session(self) -> Session:
        """The session. :meth:`warm_up` must have been called."""
        assert self._session is not None, "warmed up"
        return self._session

    @property
    def _pods(self) -> SessionPods:
        """The pods of the session. The substrate must be warm."""
        return self._warm_session.pods

    def coordinator_again(
        self,
        network: Network,
        config: RunConfig,
        token: str,
        run_directory: Path,
        nodes: Sequence[str],
    ) -> Process | None:
        """Start the coordinator in another pod if its own is lost or ending.

        Return its process, or None if no other one is started. That is so if its pod still serves,
        or the session has no driver and so ends with the coordinator's pod.

        Raises:
            BadInput, HarnessError: if no other pod starts.
        """
        session = self._warm_session
        assert isinstance(network, PodNetwork)
        pod = session.pods.get(COORDINATOR)
        if not session.is_driven or (pod is not None and pod.lives() and not pod.leaves()):
            return None
        if pod is not None:
            self.files.settle(COORDINATOR, run_directory)
        session.pods.replace(COORDINATOR)
        self._send_log(run_directory)
        network.listen(self.link(COORDINATOR))
        process = self._start_coordinator(
            network, config, token, run_directory, filter(session.pods.is_lost, nodes)
        )
        address = msgspec.json.encode(CoordinatorAddress(network.address, network.store))
        for node in nodes:
            # an agent that does not get the address gives up after its own time limit
            with contextlib.suppress(NodeUnreachable):
                self.link(node).write_unanswered(
                    address_file(self.files.home(run_directory)), address
                )
        return process

    def _send_log(self, run_directory: Path) -> None:
        """Send the coordinator's log, as far as it was received here, to its new pod.

        The log may lack the last decisions.
        """
        with contextlib.suppress(FileNotFoundError):
            log = (run_directory / COORDINATOR_LOG).read_bytes()
            self.files.prepare(COORDINATOR, run_directory)
            self.link(COORDINATOR).write(self.files.home(run_directory) / COORDINATOR_LOG, log)

    def why_not(self, action: type[Action]) -> str:
        if action in POD_ACTIONS | MACHINE_ACTIONS:
            return ""
        self.warm_up()
        if issubclass(action, Change):
            return why_not_in_pods(action, self._pod(COORDINATOR).helper)
        return why_not(self.link(COORDINATOR), action)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        yield PodApi(self._pods)
        yield MachineFaults(
            self._warm_session.api,
            SessionMachinePods(self._pods, lambda: (COORDINATOR, *cluster.nodes)),
            self._commands_of_run(),
            self._options.own_machine,
        )
        supported = supported_actions(self.link(COORDINATOR))
        home = self.files.home(cluster.run_directory)
        yield BackendAway(supported, self.link, cluster.root, home)

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Return a cluster of pods on which commands can be started.

        The directories in ``needs`` are packed now, and copied to each pod when its command starts.

        Raises:
            BadInput: if the cluster, the image, a directory or the shared volume cannot be used.
            HarnessError: if pods do not start.
        """
        sources = self._command_sources(needs, run_directory.parent)
        self._ensure_stations([*node_names(nodes)])
        shared = (
            Path(self._options.shared)
            / f"{self._warm_session.name}-{self.files.home(run_directory).name}"
            if self._options.shared
            else None
        )
        names = node_names(nodes)
        network = self.network(names, 0)
        return PodCommandCluster(
            self, network, names, run_directory, self.files, self.run_pods, sources, shared
        )

    def _command_sources(self, needs: Needs, runs: Path) -> dict[str, Source]:
        """Return the packed directories of a command, by their paths on the user's machine.

        A driver packs the copies that its client has sent, and packs them again only if they
        differ. Raises BadInput if a directory is too large, or cannot be read.

        Args:
            runs: the directory of the runs, which is not packed.
        """
        field = "working_directory"
        if not self.copies:
            return {str(path): Source(path, field, runs) for path in copied_directories(needs)}
        self._packed_copies = {  # a copy is named after its digest, so it never changes
            copy: self._packed_copies.get(copy) or Source(Path(copy), field)
            for copy in self.copies.values()
        }
        return {path: self._packed_copies[copy] for path, copy in self.copies.items()}

    def environment(self) -> None:
        """Return None: a command has the variables of its pod."""

    def _commands_of_run(self) -> ExternalCommands:
        """Return the runner of external commands: the client of this driver, or this process."""
        if self.external_commands is not None:
            return self.external_commands
        return LocalCommands(self._warm_session.machines.do)

    def job_cluster(self, *arguments: Any) -> JobCluster:
        return PodCluster(self, *arguments)

    def kill(self, node: str) -> None:
        """Delete the pod of a node with no grace, and wait until none of its processes runs.

        Raises HarnessError if that fails.
        """
        self._pods.kill(self._pod(node))

    def network(self, nodes: Sequence[str], port: int) -> Network:
        return PodNetwork(self.link(COORDINATOR), port, self._pod)

    def close(self) -> None:
        """End all processes in the pods, and delete all objects of the session.

        If a driver holds the session, only the pods are deleted. Raises ApiError if the server
        refuses or does not answer.
        """
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close()
        finally:
            super().close()


class PodCluster(JobCluster):
    """The processes of a run, in their pods.

    While an event loop runs, it watches for pods that are silent or end by themselves. A silent
    pod is lost and deleted; an end is explained in the journal.
    """

    _substrate: KubernetesSubstrate
    _last_message_s = math.inf  # monotonic time of the coordinator's last message
    # lost node -> check of its pod, while an event loop runs
    _lost_pod_checks: dict[str, asyncio.Task[None]] | None = None

    def lose(self, node: str) -> None:
        """Delete the pod of a node, and wait until no process of it is left.

        Raises HarnessError if that fails.
        """
        self._substrate.kill(node)

    def observe(self, message: Any) -> None:
        self._last_message_s = time.monotonic()
        super().observe(message)
        if isinstance(message, Plan):
            self._substrate.label_world(message, self.nodes, self.run_directory)
        if isinstance(message, NodeLost) and self._lost_pod_checks is not None:
            self._lost_pod_checks[message.node] = asyncio.get_running_loop().create_task(
                self._check_lost_node(message.node)
            )

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        with super().heard():
            checks = self._lost_pod_checks = {}
            watches = [
                asyncio.create_task(watch())
                for watch in (self._watch_coordinator, self._watch_ends)
            ]
            try:
                yield
            finally:
                self._lost_pod_checks = None
                tasks = (*watches, *checks.values())
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.result()  # raise the error of a failed watch: it has stopped checking

    async def _check_lost_node(self, node: str) -> None:
        """Note the pod of a lost node as silent if its supervisor does not answer an open stream.

        Otherwise only its agent has ended.
        """
        asked_ns = time.monotonic_ns()
        with self._substrate.run_pods.doubted(node):
            if await self._substrate.run_pods.is_silent(node):
                self._substrate.run_pods.note_silent(node, asked_ns)

    async def _watch_coordinator(self) -> None:
        """Note the coordinator's pod as silent if it does not answer any more.

        The observer's connection is shut down then: if a machine is lost, no connection ends by
        itself.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            quiet_s = time.monotonic() - self._last_message_s
            if quiet_s > max(
                _LOOK_S, 2 * self._hello.heartbeat_s
            ) and await self._substrate.run_pods.is_silent(COORDINATOR):
                self._substrate.run_pods.note_silent(COORDINATOR)
                with contextlib.suppress(OSError):
                    self._observer.shutdown(socket.SHUT_RDWR)

    async def _watch_ends(self) -> None:
        """Write to the journal why pods end that this run does not end."""
        await self._substrate.run_pods.watch_ends(self._stations, self.run_directory)

    def _stations(self) -> tuple[str, ...]:
        """Return the coordinator, the nodes of the run, and the standbys."""
        return (COORDINATOR, *self.nodes, *self._substrate.run_pods.standbys())

    def _describe_end(self) -> str:
        reason = self._substrate.why_ended()
        return super()._describe_end() + (f": {reason}" if reason else "")

    def end(self) -> None:
        try:
            self._substrate.run_pods.settle_ends(self._stations(), self.run_directory)
        finally:
            super().end()
        if sys.exception() is None:  # after an error no verdict needs an explanation
            self._substrate.run_pods.await_machines(self.run_directory)

    def together(self, node: str) -> tuple[str, ...]:
        return self._substrate.run_pods.together(node, self.nodes)

    async def replace(self, node: str) -> None:
        """Start a node in its pod if that is still there, else in another one.

        Raises BadInput or HarnessError if no pod can be created, or the pod does not answer.
        """
        if (
            self._lost_pod_checks is not None
            and (check := self._lost_pod_checks.get(node)) is not None
        ):
            await asyncio.shield(check)
        await self._substrate.ensure_pod(node, self.run_directory)
        # the requests that follow would wait for its answers
        if await self._substrate.run_pods.is_silent(node):
            self._substrate.run_pods.note_silent(node)
            raise HarnessError(f"the pod of {node} does not answer")
        self.restart(node)
