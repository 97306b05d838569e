"""Substrate ``docker``: every node is a container, with a network of its own; so is the coordinator."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput, HarnessError
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import node_names
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.core.extensions import BackendPlace, brought_backends
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.disk.disks import Disks
from chaoskit.substrate.docker import daemon
from chaoskit.substrate.docker.container import Container
from chaoskit.substrate.docker.holds import BY_DOCKER, ContainerHolds
from chaoskit.substrate.docker.image import Recipe, host_recipe, image_recipe
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.holds import ProcessHolds
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.substrate.netns.substrate import NamespaceNetwork
from chaoskit.substrate.netns.switch import Move, Switch
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import temporary_directory
from chaoskit.substrate.undo.docker_janitor import endpoint, remove_abandoned
from chaoskit.wire.injection_line import InjectionDoor

#: Warm containers that take the places of the first ones that are lost: starting one costs seconds of imports.
_STANDBYS = ("standby0", "standby1")


class DockerSubstrate(LocalSubstrate):
    """Keeps a warm container for each node. One that was lost is replaced before the next run; in a run that is to
    replace nodes, up to two more stand by.

    Args:
        image: has chaoskit in it; "" for this host's own Python, through read-only mounts.
    """

    name = "docker"

    def __init__(self, image: str = "") -> None:
        super().__init__()
        with contextlib.suppress(OSError):  # whether there is a daemon was asked before
            remove_abandoned(endpoint())
        self._image = image
        self._client: Any = None
        self._recipe: Recipe | None = None
        self._switch: Switch | None = None
        self.containers: dict[str, Container] = {}  # by station

    # -- containers -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start the switch and the coordinator's container. How many nodes there will be is known to a run only."""
        if self._switch is None or self._switch.process.poll() is not None:
            self._switch = Switch(self.undo, privileged=True)
        self._see()
        self._stand_ready([COORDINATOR])

    def _see(self, *read_only: Path, writable: Sequence[Path] = ()) -> None:
        """Have these directories in all containers, besides what Python needs."""
        if self._recipe is None:
            with _docker_errors("start"):
                self._client = daemon.connect()
                self._recipe = (
                    image_recipe(self._client, self._image)
                    if self._image
                    else host_recipe(self._client)
                )
        self._recipe = self._recipe.with_directories(read_only, writable)

    def _stand_ready(self, stations: Sequence[str]) -> None:
        """Have a container for each, all at once: their imports take seconds."""
        wanting = [station for station in stations if not self._serves(station)]
        _at_once(
            self.containers.pop(station).remove for station in wanting if station in self.containers
        )
        self._start_containers(wanting, cold=False)

    def _serves(self, station: str) -> bool:
        container = self.containers.get(station)
        if container is None or container.recipe is not self._recipe:
            return False
        with _docker_errors("ask after"):
            return container.is_usable()

    def _start_containers(self, stations: Sequence[str], *, cold: bool) -> None:
        if not stations:
            return
        assert self._recipe is not None
        sockets, undo = temporary_directory("docker", self.undo)
        try:
            for station in stations:
                self.containers[station] = Container(
                    self._client,
                    self._recipe,
                    station,
                    sockets,
                    self.undo,
                    cold=cold or station == COORDINATOR,
                )
            with _docker_errors("start"):
                _at_once(self.containers[station].start for station in stations)
        finally:
            shutil.rmtree(
                sockets, ignore_errors=True
            )  # a supervisor that is connected does not need it
            undo.done()

    def kill(self, node: str) -> None:
        """End everything in the node's container, if that is still there."""
        if self.containers[node].lives():
            with _docker_errors("kill"):
                self.containers[node].kill()

    def spend(self, node: str) -> None:
        """Have another container for the node in the next run."""
        self.containers[node].spent = True

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
            BadInput: if the image or the device cannot be used. HarnessError: if Docker cannot do it.
        """
        if config.device != "cpu":
            raise BadInput(
                "device", config.device, "use 'cpu': containers are given no other device"
            )
        run_directory = run_directory.resolve()
        run_directory.mkdir(parents=True, exist_ok=True)
        # the runs of a harness lie beside each other: so the containers of one are good for the next
        self._see(config.job.folder, writable=[run_directory.parent])
        self._stand_ready([COORDINATOR, *node_names(config.nodes_max), *_STANDBYS[:replacements]])
        return super().launch(
            config, run_directory, port=port, heartbeat_s=heartbeat_s, injection=injection
        )

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Nodes on which commands can be started.

        Raises:
            BadInput: if the image cannot be used. HarnessError: if Docker cannot do it.
        """
        if Path("/") in (*needs.read, *needs.written):
            raise BadInput(
                "working_directory", "/", "use another one: a container has a root of its own"
            )
        self._see(*needs.read, writable=[run_directory.parent, *needs.written])
        self._stand_ready([COORDINATOR, *node_names(nodes)])
        return super().bare(nodes, run_directory)

    def bare_cluster(self, *arguments: Any) -> BareCluster:
        return DockerBareCluster(self, *arguments)

    def environment(self) -> Mapping[str, str]:
        assert self._recipe is not None
        return self._recipe.environment if self._image else super().environment()

    def network(self, nodes: Sequence[str], port: int) -> Network:
        assert self._switch is not None
        return ContainerNetwork(
            self._switch, {name: self.containers[name] for name in (COORDINATOR, *nodes)}, port
        )

    def why_not(self, action: type[Action]) -> str:
        return "" if action in BY_DOCKER else capabilities.why_not(action)

    def link(self, station: str) -> SupervisorLink:
        return self.containers[station].link

    def job_cluster(self, *arguments: Any) -> JobCluster:
        return DockerCluster(self, *arguments)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        def root(node: str) -> Process:
            self.spend(node)  # the mounts that it will have are those of the container
            return cluster.root(node)

        yield ContainerHolds(self.undo, cluster.node, cluster.run_directory, self.containers)
        yield ProcessHolds(self.undo)
        yield Disks(self.undo, self._enter_mounts, root)
        yield from brought_backends(
            BackendPlace(self.name, self.undo, cluster.node, cluster.run_directory)
        )

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of a run, in a new container if the node's own is lost."""
        if not self.containers[node].lives():
            self.containers[node].remove()
            self._take_over(node)
            assert isinstance(network, ContainerNetwork)
            network.move(node, self.containers[node])
        return super().start_agent(network, node, token, run_directory, injection)

    def _take_over(self, node: str) -> None:
        """Have another container for a node in the middle of a run."""
        for name in _STANDBYS:
            standby = self.containers.pop(name, None)
            if standby is not None and standby.recipe is self._recipe and standby.is_usable():
                self.containers[node] = standby
                return
            if standby is not None:
                standby.remove()
        self._start_containers(
            [node], cold=True
        )  # the harness waits: imports can come in the agent
        self.spend(node)  # the next run wants a warm one

    def close(self) -> None:
        """Remove all containers, and with them everything that was started."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        _at_once(container.remove for container in self.containers.values())
        self.containers.clear()
        if self._client is not None:
            self._client.close()
        super().close()


class _InContainers(BaseCluster):
    """What is done to nodes otherwise where they are containers."""

    _substrate: DockerSubstrate

    def lose(self, node: str) -> None:
        if node not in self._cuts and (cut := self._network.isolate(node)) is not None:
            self._cuts[node] = cut
        self._substrate.kill(node)
        super().lose(node)  # waits until the kernel has done it


class DockerCluster(_InContainers, JobCluster):
    """One run's processes, in their containers."""

    _substrate: DockerSubstrate


class DockerBareCluster(_InContainers, BareCluster):
    """One run's commands, in their containers."""

    _substrate: DockerSubstrate


class ContainerNetwork(NamespaceNetwork):
    """One run's network between containers. Their own namespaces are connected, and left as they were."""

    def __init__(self, switch: Switch, containers: dict[str, Container], port: int) -> None:
        coordinator, *nodes = containers
        assert coordinator == COORDINATOR
        lent = [container.network_namespace() for container in containers.values()]
        super().__init__(switch, nodes, port, lent)

    def namespace(self, name: str) -> tuple[int, ...]:
        """None to enter: a process that is started in a container is there."""
        return ()

    def move(self, name: str, container: Container) -> None:
        """Connect a container in the place of one that was lost."""
        self.lend(Move(self._number, name), [container.network_namespace()])


def _at_once(acts: Iterator[Callable[[], object]]) -> None:
    """Do them at the same time. Raises what one of them raised, when all are over."""
    found = list(acts)
    if found:
        with ThreadPoolExecutor(len(found)) as pool:
            for future in [pool.submit(act) for act in found]:
                future.result()


@contextlib.contextmanager
def _docker_errors(act: str) -> Iterator[None]:
    """What the SDK raises, as an error of the harness."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:  # requests' errors are the second
        raise HarnessError(f"Docker could not {act} containers: {error}") from error
