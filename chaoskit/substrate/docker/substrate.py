"""Substrate ``docker``: nodes and the coordinator are containers with networks of their own.

-> substrate/cluster/supervised.py starts agents and coordinator in them; substrate/netns/switch.py
connects their networks.
-> substrate/undo/docker_janitor.py removes the containers of a launcher that was killed.
"""

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
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate, node_names
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.core.extensions import BackendPlace, external_backends
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.disk.disks import Disks
from chaoskit.substrate.docker import daemon
from chaoskit.substrate.docker.container import Container
from chaoskit.substrate.docker.holds import BY_DOCKER, ContainerHolds
from chaoskit.substrate.docker.image import Recipe, host_recipe, image_recipe
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.holds import ProcessHolds
from chaoskit.substrate.local import enter_mounts
from chaoskit.substrate.netns.substrate import NamespaceNetwork
from chaoskit.substrate.netns.switch import Move, Switch
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import temporary_directory
from chaoskit.substrate.undo.docker_janitor import endpoint, remove_abandoned
from chaoskit.wire.injection_line import InjectionDoor

#: Warm containers that replace the first lost ones: starting one costs seconds of imports.
_STANDBYS = ("standby0", "standby1")


class DockerSubstrate(SupervisedSubstrate):
    """A substrate with a warm container for the coordinator and for each node.

    A lost container is replaced before the next run. In a run that replaces nodes, up to two more
    stand by. The constructor removes the containers of launchers that are gone.

    Args:
        image: an image with chaoskit in it; "" for this host's own Python, through read-only
            mounts.

    Attributes:
        containers: station -> its container. A station is a node, the coordinator, or a container
            that stands by.
    """

    name = "docker"

    def __init__(self, image: str = "") -> None:
        super().__init__()
        with contextlib.suppress(OSError):  # the check for a daemon is made before
            remove_abandoned(endpoint())
        self._image = image
        self._client: Any = None
        self._recipe: Recipe | None = None
        self._switch: Switch | None = None
        self.containers: dict[str, Container] = {}

    # -- containers --------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Start the switch and the coordinator's container.

        The number of nodes is known only to a run. Raises BadInput if the image cannot be used, and
        HarnessError if Docker or the switch fails.
        """
        if self._switch is None or self._switch.process.poll() is not None:
            self._switch = Switch(self.undo, privileged=True)
        self._mount()
        self._ensure_containers([COORDINATOR])

    def _mount(self, *read_only: Path, writable: Sequence[Path] = ()) -> None:
        """Mount these directories in all further containers, besides those that Python needs.

        The first call connects to Docker and looks the image up. Raises BadInput if the image
        cannot be used, and HarnessError if Docker fails.
        """
        if self._recipe is None:
            with _docker_errors("start"):
                self._client = daemon.connect()
                self._recipe = (
                    image_recipe(self._client, self._image)
                    if self._image
                    else host_recipe(self._client)
                )
        self._recipe = self._recipe.with_directories(read_only, writable)

    def _ensure_containers(self, stations: Sequence[str]) -> None:
        """Start a usable container for each station that has none.

        Containers that cannot be used are removed first. All start at once: imports take seconds.
        Raises HarnessError as :meth:`_start_containers`.
        """
        missing = [station for station in stations if not self._serves(station)]
        _run_parallel(
            self.containers.pop(station).remove for station in missing if station in self.containers
        )
        self._start_containers(missing, cold=False)

    def _serves(self, station: str) -> bool:
        """Return whether the container of a station can be used for a run.

        It must have the present mounts. Raises HarnessError if Docker fails.
        """
        container = self.containers.get(station)
        if container is None or container.recipe is not self._recipe:
            return False
        with _docker_errors("inspect"):
            return container.is_usable()

    def _start_containers(self, stations: Sequence[str], *, cold: bool) -> None:
        """Create a container for each of these stations and start all at the same time.

        Raises HarnessError if Docker refuses or a supervisor does not start.

        Args:
            cold: True if their supervisors import nothing beforehand.
        """
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
                _run_parallel(self.containers[station].start for station in stations)
        finally:
            shutil.rmtree(sockets, ignore_errors=True)  # a connected supervisor does not need it
            undo.done()

    def kill(self, node: str) -> None:
        """SIGKILL all processes in the container of a node, if it is still there.

        Raises HarnessError if Docker refuses.
        """
        if self.containers[node].lives():
            with _docker_errors("kill"):
                self.containers[node].kill()

    def spend(self, node: str) -> None:
        """Make the next run use another container for the node."""
        self.containers[node].is_spent = True

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

        Raises:
            BadInput: if the image or the device cannot be used.
            HarnessError: if Docker fails, or coordinator, agents or their network do not start.
        """
        if config.device != "cpu":
            raise BadInput("device", config.device, "use 'cpu': containers support no other device")
        run_directory = run_directory.resolve()
        run_directory.mkdir(parents=True, exist_ok=True)
        # runs of a harness share the parent directory, so that their containers can be reused
        self._mount(config.job.folder, writable=[run_directory.parent])
        self._ensure_containers(
            [COORDINATOR, *node_names(config.nodes_max), *_STANDBYS[:replacements]]
        )
        return super().launch(
            config, run_directory, port=port, heartbeat_s=heartbeat_s, injection=injection
        )

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Return a cluster of nodes on which commands can be started.

        Raises:
            BadInput: if the image cannot be used, or the root directory is needed.
            HarnessError: if Docker fails.
        """
        if Path("/") in (*needs.read, *needs.written):
            raise BadInput(
                "working_directory",
                "/",
                "use another one: a container has a root directory of its own",
            )
        self._mount(*needs.read, writable=[run_directory.parent, *needs.written])
        self._ensure_containers([COORDINATOR, *node_names(nodes)])
        return super().bare(nodes, run_directory)

    def environment(self) -> Mapping[str, str] | None:
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

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        def root(node: str) -> Process:
            self.spend(node)  # the disk is mounted in the container, which no other run may use
            return cluster.root(node)

        yield ContainerHolds(self.undo, cluster.node, cluster.run_directory, self.containers)
        yield ProcessHolds(self.undo)
        yield Disks(self.undo, enter_mounts, root)
        yield from external_backends(
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
        """Start an agent of a run, in a new container if the node's own is lost.

        Return its process. Raises HarnessError if the container or the agent does not start.
        """
        if not self.containers[node].lives():
            self.containers[node].remove()
            self._replace_container(node)
            assert isinstance(network, ContainerNetwork)
            network.move(node, self.containers[node])
        return super().start_agent(network, node, token, run_directory, injection)

    def _replace_container(self, node: str) -> None:
        """Give a node another container during a run: a standby, or a new one.

        A new one is not used for further runs. Raises HarnessError if it does not start, and the
        SDK's errors if a standby cannot be inspected.
        """
        for name in _STANDBYS:
            standby = self.containers.pop(name, None)
            if standby is not None and standby.recipe is self._recipe and standby.is_usable():
                self.containers[node] = standby
                return
            if standby is not None:
                standby.remove()
        # cold: the harness waits, and the agent can import by itself
        self._start_containers([node], cold=True)
        self.spend(node)  # the next run needs a warm one

    def close(self) -> None:
        """Remove all containers and everything that was started in them."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        _run_parallel(container.remove for container in self.containers.values())
        self.containers.clear()
        if self._client is not None:
            self._client.close()
        super().close()


class ContainerNetwork(NamespaceNetwork):
    """The network of a run between containers.

    It connects their own namespaces and leaves these at the end.

    Args:
        containers: the coordinator's under ``COORDINATOR`` first, then one for each node.

    Raises:
        OSError: if a container is gone.
        HarnessError: if the switch cannot connect them, or the port is in use.
    """

    def __init__(self, switch: Switch, containers: dict[str, Container], port: int) -> None:
        coordinator, *nodes = containers
        assert coordinator == COORDINATOR
        namespaces = [container.network_namespace() for container in containers.values()]
        super().__init__(switch, nodes, port, namespaces)

    def namespace(self, name: str) -> tuple[int, ...]:
        """Return no descriptor: processes that are started in a container are in its namespace."""
        return ()

    def move(self, name: str, container: Container) -> None:
        """Connect a container in the place of a lost one.

        Raises OSError if the container is gone, and HarnessError if the switch cannot connect it.
        """
        self.lend(Move(self._number, name), [container.network_namespace()])


def _run_parallel(calls: Iterator[Callable[[], object]]) -> None:
    """Call functions at the same time, and wait for all. Raise the error of the first that fails.

    The first is that in the order of ``calls``.
    """
    functions = list(calls)
    if functions:
        with ThreadPoolExecutor(len(functions)) as pool:
            for future in [pool.submit(function) for function in functions]:
                future.result()


@contextlib.contextmanager
def _docker_errors(act: str) -> Iterator[None]:
    """Raise errors of the SDK, and OSError, in the body of a ``with`` as HarnessError.

    Args:
        act: verb of the message: "Docker could not ``act`` containers".
    """
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:  # errors of the requests package are OSError
        raise HarnessError(f"Docker could not {act} containers: {error}") from error
