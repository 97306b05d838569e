"""What an experiment needs from the place where nodes come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from chaoskit.config import RunConfig
from chaoskit.messages import Message, Trigger
from chaoskit.substrate.disk import Trouble
from chaoskit.substrate.traffic import Change

if TYPE_CHECKING:
    from chaoskit.substrate.bare import BareCluster


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was when it was looked up: ``ticks`` is its start time, which tells it from a later namesake."""

    pid: int
    ticks: int | None
    name: str


#: What a node can be short of.
Resource = Literal["cpu", "memory", "pids", "io"]


class Freeze(Protocol):
    """A node that stands still."""

    def frozen(self) -> bool:
        """Whether the kernel says that every process of the node stands still. False once it is thawed."""

    def thaw(self) -> bool:
        """Let it go on; True if nothing is left to undo."""


class Limit(Protocol):
    """A node that has less than it wants."""

    def events(self) -> int:
        """How often the kernel has held the node back, or refused or ended something of it, so far."""

    def lift(self) -> bool:
        """Take the limit away; True if nothing is left to undo. What was counted stays known."""


class Cluster(Protocol):
    """The nodes of one running job, seen by an observer of its coordinator."""

    address: tuple[str, int]
    token: str
    store_port: int
    nodes: tuple[str, ...]

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""

    def send(self, message: Message) -> None:
        """Speak to the coordinator."""

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a worker of this cluster. Raises ProcessLookupError where it is gone."""

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then zygote and keeper, then workers and what they started."""

    def coordinator(self) -> Process:
        """The process that decides membership now."""

    def signal_process(self, process: Process, signum: int) -> None:
        """Send a signal to a process that was looked up before. Raises ProcessLookupError where it is gone."""

    def lose(self, node: str) -> None:
        """End everything of a node at once: where it has a network, that is cut first, in silence, and then all its
        processes are killed, with what they keep in memory. Raises HarnessError if they do not end."""

    def dropped(self, node: str) -> int:
        """How many packets from or to a node that was lost nobody got; 0 where nobody counts them."""

    def replace(self, node: str) -> None:
        """Start a new agent under the name of a node that was lost: another incarnation, with empty memory, on a
        network that works again. Raises HarnessError if something of the node still lives."""

    def provide(self, count: int) -> None:
        """See to it that as many nodes were started, the lost ones among them. Raises HarnessError if it cannot."""

    def freeze(self, node: str) -> Freeze:
        """Have all processes of a node stand still, and those that they start. What undoes it is written ahead.

        Raises ProcessLookupError where the node is gone, HarnessError where it cannot be done.
        """

    def limit(self, node: str, resource: Resource, amount: float) -> Limit:
        """Limit what all processes of a node have together, and those that they start. Raises like :meth:`freeze`.

        ``amount``: of ``cpu``, cores; of ``memory``, bytes beyond what is used now; of ``pids``, processes and threads
        beyond those there are; of ``io``, bytes a second that are written to the disk of the run's directory. What
        :meth:`Limit.events` counts: periods in which the node was held back; processes that were killed; processes and
        threads that were refused; quarters of a second in which all that may be written was.
        """

    def impose(self, change: Change) -> int:
        """Change the network between the nodes. Gives a number. Raises HarnessError where it cannot be done."""

    def packets(self, number: int) -> int:
        """How many packets a change has met so far. Raises HarnessError when the run is over."""

    def lift(self, number: int) -> int:
        """Undo a change of the network. Gives how many packets it has met. Raises HarnessError like the others."""

    def round_trips_ms(self, source: str, target: str, count: int = 1, timeout_s: float = 1.0) -> tuple[float, ...]:
        """Measure the network between two nodes, beside the job: echoes that came back. Raises HarnessError."""

    def disk(self, node: str) -> Path:
        """The directory of a node in which its job writes."""

    def trouble(self, node: str, directory: Path, trouble: Trouble) -> int:
        """Let something be wrong with a directory, as the node sees it. Gives a number. Raises HarnessError.

        Files that are open already are not troubled.
        """

    def troubled(self, number: int) -> int:
        """How many operations a trouble has refused or held up so far. Raises HarnessError when the run is over."""

    def relieve(self, number: int) -> int:
        """Undo a trouble. Gives how many operations it has met. Raises HarnessError like the others."""

    def end(self) -> None:
        """End every process of the cluster, and wait until they are gone."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Directories of this host that somebody must find on a node."""

    read: tuple[Path, ...] = ()
    written: tuple[Path, ...] = ()


NOTHING = Needs()


class Substrate(Protocol):
    """Makes clusters. Kept over many experiments."""

    name: str

    def launch(
        self,
        config: RunConfig,
        triggers: tuple[Trigger, ...],
        run_directory: Path,
        *,
        port: int = 0,
        heartbeat_s: float = 0.0,
    ) -> Cluster:
        """Start coordinator and agents of a run. Journals and logs go below ``run_directory``.

        ``heartbeat_s``: of the cluster's observer, see :class:`chaoskit.messages.ObserverHello`.
        """

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Nodes on which commands can be started, without coordinator and agents.

        ``needs``: directories of this host that the command must find there, besides Python's and the run's.
        """

    def close(self) -> None:
        """End everything that this substrate started."""
