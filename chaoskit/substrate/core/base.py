"""What an experiment needs from the place where nodes come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chaoskit.config import RunConfig
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.core.run_event import RunEvent
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import Message


class Cluster(Protocol):
    """The nodes of one running job, seen by an observer of its coordinator."""

    address: tuple[str, int]
    token: str
    store_port: int
    nodes: tuple[str, ...]

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""

    def fileno(self) -> int:
        """The descriptor that is readable when there may be a message; another one after :meth:`receive`."""

    def send(self, message: Message) -> None:
        """Speak to the coordinator, or to the one that follows it. May raise OSError."""

    def pace(self, heartbeat_s: float) -> None:
        """Be shown the heartbeats of a node so far apart from now on, while nothing else happens; 0: all of them."""

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then zygote and keeper, then workers and what they started."""

    def root(self, node: str) -> Process:
        """The process below which everything of a node runs: its agent."""

    def worker(self, node: str, pid: int) -> Process:
        """A worker of a node, as it was when it reported for duty; found now, if it has not."""

    def heard(self) -> AbstractContextManager[None]:
        """Let the event loop that runs hear what nodes tell by themselves, as long as a ``with`` lasts."""

    def coordinator(self) -> Process:
        """The process that decides membership now."""

    def lose(self, node: str) -> None:
        """End everything of a node at once: where it has a network, that is cut first, in silence, and then all its
        processes are killed, with what they keep in memory. Raises HarnessError if they do not end."""

    def together(self, node: str) -> tuple[str, ...]:
        """The nodes that are lost with this one when its machine is, and itself."""

    def dropped(self, node: str) -> int:
        """How many packets from or to a node that was lost did not arrive; 0 where they are not counted."""

    def restart(self, node: str) -> None:
        """Start an agent again under the name of a node that was lost: another incarnation, with empty memory, on a
        network that works. Raises HarnessError if something of the node still lives."""

    async def replace(self, node: str) -> None:
        """Have another node under the name of one that the coordinator holds for lost, while the event loop goes on. It
        takes seconds where a machine must be found. Raises HarnessError if something of the node still lives, or no
        other one can start."""

    def provide(self, count: int) -> None:
        """See to it that as many nodes were started, the lost ones among them. Raises HarnessError if it cannot."""

    def apply(self, node: str, action: Action) -> Applied:
        """Break something of a node until that is lifted. What undoes it is written ahead.

        Args:
            action: of :mod:`chaoskit.substrate.core.actions`, or a change of :mod:`chaoskit.substrate.core.traffic`.

        Raises:
            ProcessLookupError: where the node is gone. HarnessError: where it cannot be done.
        """

    def round_trips_ms(
        self, source: str, target: str, count: int = 1, timeout_s: float = 1.0
    ) -> tuple[float, ...]:
        """Measure the network between two nodes, beside the job: echoes that came back. Raises HarnessError."""

    def disk(self, node: str) -> Path:
        """The directory of a node in which its job writes."""

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        """Measure the same all the time, without waiting for it, until the probe is closed. Raises HarnessError."""

    def end(self) -> None:
        """End every process of the cluster, and wait until they are gone."""


class CommandCluster(Cluster, Protocol):
    """Nodes on which commands are started, without coordinator and agents.

    Attributes:
        port: free on every node.
        interface: the network interface of a node; "" for any.
    """

    port: int
    interface: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What a command finds on a node, if nothing tells it more."""

    def host(self, node: str) -> str:
        """The address of a node."""

    def start(
        self, node: str, command: tuple[str, ...], environment: dict[str, str], directory: str
    ) -> None:
        """Run ``command`` on ``node``; what it prints goes to the node's log."""

    def is_over(self, node: str) -> bool:
        """Whether the command of ``node`` has ended, and with it all that it had started."""

    def log(self, node: str) -> Path:
        """What the command of ``node`` prints."""

    def look_for_ranks(self, node: str) -> None:
        """Have ``node`` write down now which processes have ranks; it does so by itself a bit later."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Directories of this host that processes must find on a node."""

    read: tuple[Path, ...] = ()
    written: tuple[Path, ...] = ()


NOTHING = Needs()


class Substrate(Protocol):
    """Makes clusters. Kept over many experiments.

    Attributes:
        undo: what must be put back if this process is killed.
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
        """Start coordinator and agents of a run. Journals and logs go below ``run_directory``.

        ``heartbeat_s``: of the cluster's observer, see :class:`chaoskit.wire.messages.ObserverHello`. ``replacements``:
        how many nodes that are lost are expected to be replaced, so that places for them can stand ready.
        ``injection``: where the harness of a run with faults listens to workers and checkpoint daemons; a production
        launch has none.
        """

    def require(self, demand: RunDemand) -> None:
        """Refuse a run that cannot take place here, before anything of it is made. Raises BadInput, HarnessError."""

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes from here; "" if it can. Tried, where that can be."""

    def event_sink(self, run_directory: Path) -> Callable[[RunEvent], None] | None:
        """Return what shows events of a run to people that look at the platform; None where nothing does.

        It is called on another thread, waits for nothing, and raises nothing.
        """

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> CommandCluster:
        """Nodes on which commands can be started, without coordinator and agents.

        ``needs``: directories of this host that the command must find there, besides Python's and the run's.
        """

    def close(self) -> None:
        """End everything that this substrate started."""
