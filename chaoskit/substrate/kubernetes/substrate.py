"""The substrate itself: nodes of runs on the pods of a session."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit.config import RunConfig
from chaoskit.coordinator_files import RECORD, CoordinatorAddress, address_file
from chaoskit.errors import BadInput, HarnessError
from chaoskit.injection_line import InjectionDoor
from chaoskit.messages import NodeLost
from chaoskit.substrate.actions import Action, Backend
from chaoskit.substrate.away import AwaySubstrate
from chaoskit.substrate.errands import Errands, ErrandsHere
from chaoskit.substrate.job_cluster import JobCluster
from chaoskit.substrate.kubernetes.actions import MACHINE_ACTIONS, POD_ACTIONS
from chaoskit.substrate.kubernetes.backends import PodApi
from chaoskit.substrate.kubernetes.machines import Machines
from chaoskit.substrate.kubernetes.manifests import FILES, STANDBY
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.outside import Outside
from chaoskit.substrate.kubernetes.session import ANSWER_S, Pod, Session
from chaoskit.substrate.network import COORDINATOR, Network, PlainNetwork
from chaoskit.substrate.nodes import BaseCluster
from chaoskit.substrate.processes import Process
from chaoskit.substrate.supervised import node_names
from chaoskit.substrate.supervisor.away import KernelAway
from chaoskit.substrate.supervisor.link import Listener, SupervisorGone, SupervisorLink
from chaoskit.substrate.supervisor.stream import watch

_LOOK_S = 0.25  # a coordinator says something twenty times a second
_CONNECT_S = 3.0  # a pod that is gone may not answer at all; one lost packet is sent again after a second


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

    def warm_up(self) -> None:
        if self._session is not None and self._session.is_over():
            self._session.close()
            self._session = None
        if self._session is None:
            self._session = Session(self._options, self.undo, lambda line: self.tell(f"waiting for pods: {line}"))
        for station in [station for station, pod in self._session.pods.items() if not pod.lives()]:
            self._session.remove(station)
        self._session.settle_in()
        self._session.stand_ready([COORDINATOR])

    def _stand_ready(self, nodes: Sequence[str]) -> None:
        self.warm_up()
        assert self._session is not None
        self._session.stand_ready([COORDINATOR, *nodes])

    def link(self, station: str) -> SupervisorLink:
        pod = self._pods.get(station)
        if pod is None or pod.link is None:
            raise SupervisorGone(f"the pod of {station} is gone")
        return pod.link

    def links(self) -> Mapping[str, SupervisorLink]:
        return {station: pod.link for station, pod in self._pods.items() if pod.link is not None}

    def kernel(self, station: str) -> KernelAway:
        return self._pod(station).kernel

    def launch(self, config: RunConfig, run_directory: Path, *, replacements: int = 0, **options: Any) -> JobCluster:
        """Start coordinator and agents, in pods that stay.

        Raises:
            BadInput: if the cluster or the image cannot be used. HarnessError: if pods do not start.
        """
        if config.device != "cpu":
            raise BadInput("device", config.device, "use 'cpu': no GPU was tried in pods yet")
        standbys = [f"{STANDBY}{number}" for number in range(replacements)]
        self._stand_ready([*node_names(config.nodes_max), *standbys])
        return super().launch(config, run_directory, **options)

    def start_agent(
        self, network: Network, node: str, token: str, run_directory: Path, injection: InjectionDoor | None
    ) -> Process:
        """Start an agent of a run, in a new pod if the node's own is lost."""
        assert self._session is not None
        if not self._pod(node).lives():
            self.settle(node, run_directory)
            self._session.replace(node)
        return super().start_agent(network, node, token, run_directory, injection)

    async def is_silent(self, station: str) -> bool:
        """Whether the stream to a station's supervisor is open, and it does not answer."""
        link = pod.link if (pod := self._pods.get(station)) is not None else None
        return link is not None and link.is_open() and not await link.answers(ANSWER_S) and link.is_open()

    def together(self, node: str, nodes: Sequence[str]) -> tuple[str, ...]:
        """Those of these nodes whose pods are on the machine of a node's pod."""
        machine = self._pod(node).machine
        return tuple(one for one in nodes if one in self._pods and self._pods[one].machine == machine)

    async def give_up(self, station: str) -> None:
        """The machine of a station is silent."""
        assert self._session is not None
        await self._session.give_up(station)

    async def renew(self, node: str, run_directory: Path) -> None:
        """Have a pod for a node whose own is lost. Raises HarnessError, BadInput."""
        assert self._session is not None
        if (pod := self._pods.get(node)) is not None and pod.lives():
            if pod.leaves():
                raise HarnessError(f"the pod of {node} is told to go, and has not gone yet")
            return
        if pod is not None:
            self.settle(node, run_directory)
        await self._session.renew(node)

    def _pod(self, station: str) -> Pod:
        """The pod of a station. Raises SupervisorGone if it was lost since the run was to begin."""
        if (pod := self._pods.get(station)) is None:
            raise SupervisorGone(f"the pod of {station} is gone")
        return pod

    @property
    def _pods(self) -> Mapping[str, Pod]:
        return self._session.pods if self._session is not None else {}

    def coordinator_again(
        self, network: Network, config: RunConfig, token: str, run_directory: Path, nodes: Sequence[str]
    ) -> Process | None:
        """Start the coordinator in another pod if its own is lost. One without a driver takes the session along."""
        session = self._session
        assert session is not None
        assert isinstance(network, PodNetwork)
        pod = session.pods.get(COORDINATOR)
        if not session.is_driven or (pod is not None and pod.lives() and not pod.leaves()):
            return None
        if pod is None:  # another one could not be made in time
            session.stand_ready([COORDINATOR])
        else:
            self.settle(COORDINATOR, run_directory)
            session.replace(COORDINATOR)
        self._give_record(run_directory)
        network.listen(self.link(COORDINATOR))
        process = self._start_coordinator(network, config, token, run_directory, filter(session.holds_for_lost, nodes))
        address = msgspec.json.encode(CoordinatorAddress(network.address, network.store))
        for node in nodes:
            with contextlib.suppress(SupervisorGone):  # one that does not hear of it gives up in its time
                self.link(node).write_unanswered(address_file(self.home(run_directory)), address)
        return process

    def _give_record(self, run_directory: Path) -> None:
        """Have what has come of the coordinator's record in its pod: it may be less than was decided."""
        with contextlib.suppress(FileNotFoundError):
            record = (run_directory / RECORD).read_bytes()
            self.prepare(COORDINATOR, run_directory)
            self.link(COORDINATOR).write(self.home(run_directory) / RECORD, record)

    def why_not(self, action: type[Action]) -> str:
        return "" if action in POD_ACTIONS | MACHINE_ACTIONS else super().why_not(action)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        assert self._session is not None
        yield PodApi(self._session)
        yield Outside(self._session, self._doer(), self._options.machine)
        yield from super().backends(cluster)

    def _doer(self) -> Errands:
        """What does errands: the client of this driver, or this process."""
        if self.errands is not None:
            return self.errands
        assert self._session is not None
        return ErrandsHere(Machines(self._session.api, self._session.name, self._options, self.undo).do)

    def job_cluster(self, *arguments: Any) -> JobCluster:
        return PodCluster(self, *arguments)

    def kill(self, node: str) -> None:
        """Delete the pod of a node with no grace."""
        assert self._session is not None
        self._session.kill(node)

    def network(self, nodes: Sequence[str], port: int) -> Network:
        return PodNetwork(self.link(COORDINATOR), port, lambda name: self._pod(name).address)

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
    _doubts: dict[str, asyncio.Task[None]] | None = None  # by node that is lost, while the event loop hears it

    def lose(self, node: str) -> None:
        """Delete the pod of a node: nothing of it is left."""
        self._substrate.kill(node)

    def observe(self, message: Any) -> None:
        self._spoke_s = time.monotonic()
        super().observe(message)
        if isinstance(message, NodeLost) and self._doubts is not None:
            self._doubts[message.node] = asyncio.get_running_loop().create_task(self._doubt(message.node))

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        with super().heard():
            doubts = self._doubts = {}
            watch = asyncio.get_running_loop().create_task(self._watch_coordinator())
            try:
                yield
            finally:
                self._doubts = None
                for task in (watch, *doubts.values()):
                    task.cancel()

    async def _doubt(self, node: str) -> None:
        """A node is lost, and its stream may be open still: its agent alone has ended, or its machine is silent."""
        if await self._substrate.is_silent(node):
            await self._substrate.give_up(node)

    async def _watch_coordinator(self) -> None:
        """Where its machine is lost no connection ends: nothing comes any more."""
        while True:
            await asyncio.sleep(_LOOK_S)
            quiet_s = time.monotonic() - self._spoke_s
            if quiet_s > _LOOK_S and await self._substrate.is_silent(COORDINATOR):
                await self._substrate.give_up(COORDINATOR)
                with contextlib.suppress(OSError):
                    self._observer.shutdown(socket.SHUT_RDWR)

    def together(self, node: str) -> tuple[str, ...]:
        return self._substrate.together(node, self.nodes)

    async def replaced(self, node: str) -> None:
        """In its pod, if that is there still; else in another one."""
        if self._doubts is not None and (doubt := self._doubts.get(node)) is not None:
            await asyncio.shield(doubt)
        await self._substrate.renew(node, self.run_directory)
        if await self._substrate.is_silent(node):  # what follows is asked of it, and would wait for its answers
            await self._substrate.give_up(node)
            raise HarnessError(f"the pod of {node} does not answer")
        self.replace(node)


class PodNetwork(PlainNetwork):
    """The pods' own network: each has an address.

    Args:
        coordinator: its supervisor. address: of a node's pod.
    """

    interface = "eth0"

    def __init__(self, coordinator: SupervisorLink, port: int, address: Callable[[str], str]) -> None:
        self._address = address
        self.listen(coordinator, port)

    def listen(self, coordinator: SupervisorLink, port: int = 0) -> None:
        """Have the coordinator's listeners in the pod that is its now. Raises BadInput if ``port`` is in use."""
        host = self._address(COORDINATOR)
        try:
            first = coordinator.listen(host, port)
        except SupervisorGone:
            raise
        except HarnessError as error:
            if not port:
                raise
            raise BadInput("port", port, f"use another one, or 0 for any: {error}") from None
        self.listeners: tuple[Listener, Listener] = first, coordinator.listen(host, 0)
        self.address, self.store = (listener.address for listener in self.listeners)

    def host(self, name: str) -> str:
        return self._address(name)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, _CONNECT_S)
        watch(connection)
        return connection
