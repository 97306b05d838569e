"""The substrate itself: nodes of runs on the pods of a session."""

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
from chaoskit.errors import BadInput, HarnessError
from chaoskit.journal import Journal
from chaoskit.process.linux import current_test
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.remote_nodes import AwaySubstrate
from chaoskit.substrate.cluster.supervised import node_names
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.external_commands import Errands, ErrandsHere
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.kubernetes import template
from chaoskit.substrate.kubernetes.backends import PodApi
from chaoskit.substrate.kubernetes.machine_faults import Outside
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import ANSWER_S, MACHINE_ACTIONS, POD_ACTIONS
from chaoskit.substrate.kubernetes.pods.manifests import (
    FILES,
    STANDBY,
    world_annotations,
    world_labels,
)
from chaoskit.substrate.kubernetes.pods.network import PodNetwork, why_not_in_pods
from chaoskit.substrate.kubernetes.pods.placement import AVOID_S
from chaoskit.substrate.kubernetes.pods.pods import Pod, SessionPods
from chaoskit.substrate.kubernetes.preflight import FirstRefusal, Preflight, require_possible
from chaoskit.substrate.kubernetes.session import Session
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.remote_node import KernelAway
from chaoskit.vocabulary import Event
from chaoskit.wire.coordinator_files import RECORD, CoordinatorAddress, address_file
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import NodeLost, Plan

_LOOK_S = 0.25  # a coordinator says something twenty times a second
_TIDY_S = 5.0


class KubernetesSubstrate(AwaySubstrate):
    """Keeps a pod for the coordinator and one for each node, from run to run.

    Raises:
        BadInput: if the options cannot be used.
    """

    name = "kubernetes"
    files = Path(FILES)

    def __init__(self, options: KubernetesOptions) -> None:
        options.require()
        super().__init__()
        self._options = options
        self._session: Session | None = None
        self._preflight = Preflight(
            options, template.read(options.template) if options.template else {}
        )
        self._nodes_refusal = FirstRefusal()

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place. A driver leaves that to its client, which has more rights."""
        if self._options.driven is None:
            session = self._session
            self._preflight.require_run(demand, session.name if session is not None else "")

    def warm_up(self) -> None:
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
        self._session.pods.stand_ready([COORDINATOR])

    def _tell(self, line: str) -> None:
        self.tell(line)  # the driver of a session sets it

    def link(self, station: str) -> SupervisorLink:
        if (link := self._pod(station).link) is None:
            raise SupervisorGone(f"the pod of {station} is gone")
        return link

    def links(self) -> Mapping[str, SupervisorLink]:
        session = self._session
        pods = session.pods.all() if session is not None else ()
        return {pod.station: pod.link for pod in pods if pod.link is not None}

    def kernel(self, station: str) -> KernelAway:
        return self._pod(station).kernel

    def launch(
        self, config: RunConfig, run_directory: Path, *, replacements: int = 0, **options: Any
    ) -> JobCluster:
        """Start coordinator and agents, in pods that stay.

        Raises:
            BadInput: if the cluster or the image cannot be used. HarnessError: if pods do not start.
        """
        require_possible(RunDemand(config.nodes_max, device=config.device))
        self.warm_up()
        standbys = [f"{STANDBY}{number}" for number in range(replacements)]
        self._pods.drop_standbys(beyond=standbys)
        stations = [*node_names(config.nodes_max), *standbys]
        with self._nodes_refusal.remembered(len(stations)):
            self._pods.stand_ready(stations)
        self._nodes_refusal.note_success()
        self._pods.forget_taken()
        try:
            return super().launch(config, run_directory, **options)
        except BadInput:
            raise
        except HarnessError:
            needed = map(self._pods.get, (COORDINATOR, *node_names(config.nodes)))
            self._pods.require_there([pod for pod in needed if pod is not None])
            raise

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of a run, in another pod if the node's own is lost."""
        if not self._pod(node).lives():
            self.settle(node, run_directory)
            self._pods.replace(node)
        return super().start_agent(network, node, token, run_directory, injection)

    async def is_silent(self, station: str) -> bool:
        """Whether the stream to a station's supervisor is open, and it does not answer."""
        link = pod.link if (pod := self._pods.get(station)) is not None else None
        return (
            link is not None
            and link.is_open()
            and not await link.answers(ANSWER_S)
            and link.is_open()
        )

    @contextlib.contextmanager
    def doubted(self, station: str) -> Iterator[None]:
        """Ask nothing of the processes of a station, as long as a ``with`` lasts."""
        pod = self._pods.get(station)
        before = pod.kernel.is_doubted if pod is not None else False
        if pod is not None:
            pod.kernel.is_doubted = True
        try:
            yield
        finally:
            if pod is not None:
                pod.kernel.is_doubted = before

    def together(self, node: str, nodes: Sequence[str]) -> tuple[str, ...]:
        """Those of these nodes whose pods are on the machine of a node's pod."""
        there = {pod.station for pod in self._pods.on(self._pod(node).machine)}
        return tuple(one for one in nodes if one in there)

    def examine(self, stations: Iterable[str]) -> None:
        """Ask the API server why pods go that this run has not told to go. It may not answer."""
        self._pods.examine_all(stations)

    def note_ends(self, stations: Iterable[str]) -> bool:
        """Note which pods go. Return whether the reason for which one goes is to be found out."""
        pods = [pod for pod in map(self._pods.get, stations) if pod is not None]
        for pod in pods:
            pod.note_end()
        return self._pods.has_unproven() or any(pod.is_unexplained() for pod in pods)

    def write_taken(self, run_directory: Path) -> None:
        """Write down which pods something else took."""
        for pod in self._pods.take_taken():
            assert pod.disruption is not None
            journal = Journal(run_directory / "journal", "substrate", role="substrate")
            told = {"node": pod.station, "role": pod.role, "pod": pod.place}
            why = {"cause": pod.disruption.cause, "detail": pod.disruption.detail}
            journal.write(Event.POD_TAKEN, t_ns=pod.first_sign_ns, **told, **why)
            journal.close("told")

    def settle_taken(self, stations: Sequence[str], run_directory: Path) -> None:
        """Write down what is known of pods that something else took, when the run is over."""
        self.note_ends(stations)
        self.examine(stations)
        self._pods.await_tidy(_TIDY_S)
        self.write_taken(run_directory)

    def await_machines(self, run_directory: Path) -> None:
        """Wait until it is known whether machines are lost whose pods have ended without a reason. Write that down."""
        if self._pods.has_unproven():
            self.tell(
                f"a pod was lost without a reason: asking for up to {AVOID_S:g} s whether its machine was lost"
            )
        while self._pods.has_unproven():
            self._pods.examine_machines()
            time.sleep(_LOOK_S)
        self.write_taken(run_directory)

    def why_ended(self) -> str:
        """Return what has ended the session from outside, if its own process drives it; "" if nothing shows that."""
        return (
            "" if self._session is None or self._session.is_driven else self._session.explain_end()
        )

    def note_silent(self, station: str, since_ns: int = 0) -> None:
        """The supervisor of a station does not answer: its pod is lost. ``since_ns``: when that was asked first."""
        self._pods.note_silent(self._pod(station), since_ns)

    def standbys(self) -> tuple[str, ...]:
        """The stations of pods that stand by."""
        return tuple(pod.station for pod in self._pods.all() if pod.stands_by)

    async def ensure_pod(self, node: str, run_directory: Path) -> None:
        """Have a pod for a node whose own is lost, if it is, while the event loop goes on.

        Raises:
            BadInput, HarnessError: if it is told to go and has not gone, or no other one can be made now.
        """
        if (pod := self._pods.get(node)) is not None and pod.lives():
            if pod.leaves():
                raise HarnessError(f"the pod of {node} is told to go, and has not gone yet")
            return
        if pod is not None:
            self.settle(node, run_directory)
            pod.note_end()
            pod.hang_up()  # the loop may hear it, and what follows is done elsewhere
        run_over = threading.Event()
        try:
            await asyncio.to_thread(self._other_pod, node, pod, run_over.is_set)
        finally:
            run_over.set()

    def _other_pod(self, node: str, former: Pod | None, is_run_over: Callable[[], bool]) -> None:
        if former is not None:
            self._pods.kill(
                former, is_run_over
            )  # no agent is started while anything of the one before may run
        self._pods.replace(
            node, is_run_over, self._store_source
        )  # the directory of a large job takes a while

    def label_world(self, plan: Plan, nodes: Sequence[str], run_directory: Path) -> None:
        """Have the pods of a run's nodes say which ranks of a generation they have, and for which test."""
        ranks: dict[str, list[int]] = {node: [] for node in nodes}
        for member in plan.members:
            ranks.setdefault(member.node, []).append(member.rank)
        run, test = run_directory.name, self._test()
        for node, there in ranks.items():
            annotations = world_annotations(run, test, there, plan.generation)
            self._pods.label(node, world_labels(run, there, plan.generation), annotations)

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None]:
        """Return what writes events of a run about the Job of the session."""
        run, test = run_directory.name, self._test()

        def write(event: RunEvent) -> None:
            if (session := self._session) is not None:
                session.write_event(event, run, test)

        return write

    def _test(self) -> str:
        """The test of the run, which the client of a driver has named."""
        return self.test or current_test()

    def _pod(self, station: str) -> Pod:
        """The pod of a station. Raises SupervisorGone if it was lost since the run was to begin."""
        if (pod := self._pods.get(station)) is None:
            raise SupervisorGone(f"the pod of {station} is gone")
        return pod

    @property
    def _pods(self) -> SessionPods:
        assert self._session is not None, "warmed up"
        return self._session.pods

    def coordinator_again(
        self,
        network: Network,
        config: RunConfig,
        token: str,
        run_directory: Path,
        nodes: Sequence[str],
    ) -> Process | None:
        """Start the coordinator in another pod if its own is lost. One without a driver takes the session along."""
        session = self._session
        assert session is not None
        assert isinstance(network, PodNetwork)
        pod = session.pods.get(COORDINATOR)
        if not session.is_driven or (pod is not None and pod.lives() and not pod.leaves()):
            return None
        if pod is not None:
            self.settle(COORDINATOR, run_directory)
        session.pods.replace(COORDINATOR)
        self._give_record(run_directory)
        network.listen(self.link(COORDINATOR))
        process = self._start_coordinator(
            network, config, token, run_directory, filter(session.pods.is_lost, nodes)
        )
        address = msgspec.json.encode(CoordinatorAddress(network.address, network.store))
        for node in nodes:
            with contextlib.suppress(
                SupervisorGone
            ):  # one that does not hear of it gives up in its time
                self.link(node).write_unanswered(address_file(self.home(run_directory)), address)
        return process

    def _give_record(self, run_directory: Path) -> None:
        """Have what has come of the coordinator's record in its pod: it may be less than was decided."""
        with contextlib.suppress(FileNotFoundError):
            record = (run_directory / RECORD).read_bytes()
            self.prepare(COORDINATOR, run_directory)
            self.link(COORDINATOR).write(self.home(run_directory) / RECORD, record)

    def why_not(self, action: type[Action]) -> str:
        if action in POD_ACTIONS | MACHINE_ACTIONS:
            return ""
        if issubclass(action, Change):
            self.warm_up()
            return why_not_in_pods(action, self._pod(COORDINATOR).helper)
        return super().why_not(action)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        assert self._session is not None
        yield PodApi(self._pods)
        yield Outside(
            self._session, self._errands_of_run(), self._options.own_machine, lambda: cluster.nodes
        )
        yield from super().backends(cluster)

    def _errands_of_run(self) -> Errands:
        """By the client of this driver, or by this process."""
        if self.errands is not None:
            return self.errands
        assert self._session is not None
        return ErrandsHere(self._session.machines.do)

    def job_cluster(self, *arguments: Any) -> JobCluster:
        return PodCluster(self, *arguments)

    def kill(self, node: str) -> None:
        """Delete the pod of a node with no grace."""
        self._pods.kill(self._pod(node))

    def network(self, nodes: Sequence[str], port: int) -> Network:
        return PodNetwork(self.link(COORDINATOR), port, self._pod)

    def close(self) -> None:
        """End everything in the pods, and delete them."""
        session, self._session = self._session, None
        try:
            if session is not None:
                session.close()
        finally:
            super().close()


class PodCluster(JobCluster):
    """One run's processes, in their pods."""

    _substrate: KubernetesSubstrate
    _spoke_s = math.inf  # when the coordinator was heard last
    _doubts: dict[str, asyncio.Task[None]] | None = (
        None  # by node that is lost, while the event loop hears it
    )

    def lose(self, node: str) -> None:
        """Delete the pod of a node: nothing of it is left."""
        self._substrate.kill(node)

    def observe(self, message: Any) -> None:
        self._spoke_s = time.monotonic()
        super().observe(message)
        if isinstance(message, Plan):
            self._substrate.label_world(message, self.nodes, self.run_directory)
        if isinstance(message, NodeLost) and self._doubts is not None:
            self._doubts[message.node] = asyncio.get_running_loop().create_task(
                self._doubt(message.node)
            )

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        with super().heard():
            doubts = self._doubts = {}
            watches = [
                asyncio.create_task(watch())
                for watch in (self._watch_coordinator, self._watch_pods)
            ]
            try:
                yield
            finally:
                self._doubts = None
                tasks = (*watches, *doubts.values())
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.result()  # one that failed has looked at nothing since

    async def _doubt(self, node: str) -> None:
        """A node is lost, and its stream may be open still: its agent alone has ended, or its machine is silent."""
        asked_ns = time.monotonic_ns()
        with self._substrate.doubted(node):
            if await self._substrate.is_silent(node):
                self._substrate.note_silent(node, asked_ns)

    async def _watch_coordinator(self) -> None:
        """Where its machine is lost no connection ends: nothing comes any more."""
        while True:
            await asyncio.sleep(_LOOK_S)
            quiet_s = time.monotonic() - self._spoke_s
            if quiet_s > max(
                _LOOK_S, 2 * self._hello.heartbeat_s
            ) and await self._substrate.is_silent(COORDINATOR):
                self._substrate.note_silent(COORDINATOR)
                with contextlib.suppress(OSError):
                    self._observer.shutdown(socket.SHUT_RDWR)

    async def _watch_pods(self) -> None:
        """Find out why pods go that this run has not told to go. The loop waits for no answer of the API server."""
        examination: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._substrate.note_ends(self._stations()) and (
                examination is None or examination.done()
            ):
                examined = asyncio.to_thread(self._substrate.examine, self._stations())
                examination = asyncio.create_task(examined)
            self._substrate.write_taken(self.run_directory)

    def _stations(self) -> tuple[str, ...]:
        return (COORDINATOR, *self.nodes, *self._substrate.standbys())

    def _how_it_ended(self) -> str:
        why = self._substrate.why_ended()
        return super()._how_it_ended() + (f": {why}" if why else "")

    def end(self) -> None:
        try:
            self._substrate.settle_taken(self._stations(), self.run_directory)
        finally:
            super().end()
        if sys.exception() is None:  # else no verdict waits for an explanation
            self._substrate.await_machines(self.run_directory)

    def together(self, node: str) -> tuple[str, ...]:
        return self._substrate.together(node, self.nodes)

    async def replace(self, node: str) -> None:
        """In its pod, if that is there still; else in another one."""
        if self._doubts is not None and (doubt := self._doubts.get(node)) is not None:
            await asyncio.shield(doubt)
        await self._substrate.ensure_pod(node, self.run_directory)
        if await self._substrate.is_silent(
            node
        ):  # what follows is asked of it, and would wait for its answers
            self._substrate.note_silent(node)
            raise HarnessError(f"the pod of {node} does not answer")
        self.restart(node)
