"""Nodes without agents and coordinator: on each runs one command, watched over by a warden."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.command_runner import LOOK, WardenSpec
from chaoskit.substrate.cluster.network import Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.core.actions import Backend
from chaoskit.substrate.core.processes import Process
from chaoskit.wire.messages import Message

_FAREWELL_S = 3.0  # in which a warden ends what is below it


class StartsCommands(Protocol):
    """What starts commands on nodes, and ends them."""

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """What carries out actions on the nodes of a run, beside its network."""

    def environment(self) -> Mapping[str, str]:
        """What a command finds there, if nothing tells it more."""

    def start_command(self, network: Network, spec: WardenSpec) -> Process:
        """Start a node's command. Gives the process of its warden."""

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """End these programs of nodes, and everything below them."""


class BareCluster(BaseCluster):
    """The nodes of one run of a command. What faults can do to them is the same as in every cluster.

    Attributes:
        port: free on every node.
    """

    address = ("", 0)
    token = ""
    store_port = 0

    def __init__(
        self,
        substrate: StartsCommands,
        network: Network,
        nodes: tuple[str, ...],
        run_directory: Path,
    ) -> None:
        super().__init__(network, nodes, run_directory, substrate.backends)
        self._substrate = substrate
        self.interface = network.interface
        self.port = network.address[1]
        for listener in network.listeners:
            listener.close()  # there is no coordinator: the ports are free again
        self._wardens: dict[str, Process] = {}  # by node

    @property
    def environment(self) -> Mapping[str, str]:
        """What a command finds on a node, if it is told no more."""
        return self._substrate.environment()

    def host(self, node: str) -> str:
        """The address of a node."""
        return self._network.host(node)

    def start(
        self, node: str, command: tuple[str, ...], environment: dict[str, str], directory: str
    ) -> None:
        """Run ``command`` on ``node``; what it prints goes to the node's log."""
        self.disk(node).mkdir(parents=True, exist_ok=True)
        spec = WardenSpec(node, command, environment, directory, str(self.run_directory))
        self._wardens[node] = self._substrate.start_command(self._network, spec)

    def is_over(self, node: str) -> bool:
        """Whether the command of ``node`` has ended, and with it all that it had started."""
        return self._wardens[node].is_gone()

    def log(self, node: str) -> Path:
        """What the command of ``node`` prints."""
        return self.run_directory / "log" / f"{node}.log"

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its command first, then whatever that has started. The warden is none of them."""
        warden = self._wardens[node]
        return [process for process in warden.kernel.tree(warden) if process != warden]

    def root(self, node: str) -> Process:
        return self._wardens[node]

    def look_for_ranks(self, node: str) -> None:
        """Have the warden of ``node`` write down now which processes have ranks; it does so by itself a bit later."""
        _tell(self._wardens[node], LOOK)

    def end(self) -> None:
        """End every process of the run, and wait until they are gone."""
        self._release()
        for warden in self._wardens.values():
            _tell(warden, signal.SIGTERM)
        with contextlib.ExitStack() as ended:
            ended.callback(self._close_backends)
            ended.callback(self._network.close)
            self._substrate.end(self._wardens.items(), _FAREWELL_S)

    # -- what only chaoskit's own runtime has -----------------------------------------------------------------------

    def receive(self, timeout_s: float) -> Any | None:
        return _no_coordinator()

    def fileno(self) -> int:
        return _no_coordinator()

    def pace(self, heartbeat_s: float) -> None:
        _no_coordinator()

    def send(self, message: Message) -> None:
        _no_coordinator()

    def heard(self) -> contextlib.AbstractContextManager[None]:
        return _no_coordinator()

    def coordinator(self) -> Process:
        return _no_coordinator()

    def worker(self, node: str, pid: int) -> Process:
        return _no_coordinator()

    def restart(self, node: str) -> None:
        _no_coordinator()

    def provide(self, count: int) -> None:
        _no_coordinator()


def _no_coordinator() -> NoReturn:
    raise HarnessError("a command has no coordinator")


def _tell(process: Process, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.signal(signum)
