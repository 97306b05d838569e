"""One run of a job: its coordinator, its nodes, and what the coordinator says of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from chaoskit.errors import HarnessError, Refused
from chaoskit.process.linux import await_readable, describe_status
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.core.actions import Backend
from chaoskit.substrate.core.processes import Kernel, Process
from chaoskit.substrate.supervisor.client import SupervisorGone, SupervisorLink
from chaoskit.wire import frames, messages
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import Message, ObserverHello, Welcome

_END_S = 10.0
_FAREWELL_S = 3.0
_MOVES = 3  # of a coordinator whose machines are lost one after the other, before it is found


class StartsAgents(Protocol):
    """What a run needs of its substrate."""

    def link(self, station: str) -> SupervisorLink:
        """The supervisor that starts what belongs to a node, or to the coordinator."""

    def kernel(self, station: str) -> Kernel:
        """The kernel that knows the processes of a node, or the coordinator's."""

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """What carries out actions on the nodes, beside the network's own."""

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of the run."""

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """End programs, and everything below them."""

    def collect(self, run_directory: Path) -> None:
        """Have all journals and logs of the run here. Nothing of it runs any more."""


def attach(network: Network, token: str, hello: ObserverHello) -> socket.socket:
    """An observer's connection to the coordinator. Raises OSError, Refused."""
    connection = network.connect()
    try:
        frames.introduce(connection, token)
        frames.send(connection, hello)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_gone(process: Process) -> bool:
    """Whether that is known: a node that is being taken away may not tell at once."""
    with contextlib.suppress(SupervisorGone):
        return process.is_gone()
    return False


_ALL = ObserverHello()


class JobCluster(BaseCluster):
    """One run's processes."""

    def __init__(
        self,
        substrate: StartsAgents,
        network: Network,
        observer: socket.socket,
        token: str,
        coordinator: Process,
        agents: dict[str, Process],
        run_directory: Path,
        hello: ObserverHello = _ALL,
        injection: InjectionDoor | None = None,
        coordinator_again: Callable[[Sequence[str]], Process | None] = lambda nodes: None,
    ) -> None:
        super().__init__(network, tuple(agents), run_directory, substrate.backends)
        self._substrate, self._hello, self._observer, self._injection = (
            substrate,
            hello,
            observer,
            injection,
        )
        self.address, self.token, self.store_port = network.address, token, network.store[1]
        self._first_coordinator, self._coordinator = (
            coordinator,
            coordinator,
        )  # first: of its machine
        self._coordinator_again = coordinator_again
        self._agents = agents
        self._workers: dict[tuple[str, int], Process] = {}  # node, pid
        self._hearing: tuple[contextlib.ExitStack, set[SupervisorLink]] | None = None
        self._splitter = frames.Splitter()
        self._attached: tuple[str, ...] | None = (
            None  # nodes that have connected, once the job is over
        )
        self._over = (
            False  # agents are ending by themselves, and write down how their workers ended
        )
        self._inbox: list[Any] = []
        self._unsent: list[Message] = []  # for the next coordinator

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""
        deadline_s = time.monotonic() + timeout_s
        while not self._inbox:
            if not await_readable(
                [self._observer.fileno()], max(0.0, deadline_s - time.monotonic())
            ):
                return None
            if data := self._hear():
                self._inbox += self._splitter.feed(data)
            elif self._over:
                raise ConnectionError("the coordinator is gone")
            else:
                self._attach()
        message = self._inbox.pop(0)
        self.observe(message)
        return message

    def _hear(self) -> bytes:
        try:
            return self._observer.recv(65536)
        except OSError:
            return b""

    def _attach(self) -> None:
        """Find the coordinator that takes over. Its port stays open meanwhile, unless its machine is lost."""
        self._observer.close()
        self._splitter = frames.Splitter()
        unsent, self._unsent = self._unsent, []
        try:
            self._move_coordinator()  # what is known to be lost need not be dialed
            for moves_left in reversed(range(_MOVES)):
                try:
                    self._observer = attach(self._network, self.token, self._hello)
                    break
                except OSError:
                    if not moves_left or not self._move_coordinator():
                        raise
            for message in unsent:
                frames.send(self._observer, message)
        except (OSError, Refused, HarnessError) as error:
            raise ConnectionError(
                f"{self._how_it_ended()}, and no other took over: {error}"
            ) from error

    def _move_coordinator(self) -> bool:
        """Have a coordinator on another machine, if the one that it was on is lost. That one may be lost as well."""
        try:
            again = self._coordinator_again(self.nodes)
            if again is None:
                return False
            self._first_coordinator = self._coordinator = again
            self.address, self.store_port = self._network.address, self._network.store[1]
            self._hear_supervisor(COORDINATOR)
        except SupervisorGone:
            pass
        return True

    def _how_it_ended(self) -> str:
        """The last coordinator, in words."""
        status = None
        with contextlib.suppress(SupervisorGone):  # then nothing tells
            link = self._substrate.link(COORDINATOR)
            status = link.exits.get(self._coordinator.pid) if link.is_open() else None
        return "the coordinator is gone" + (
            f" ({' '.join(describe_status(status))})" if status is not None else ""
        )

    def observe(self, message: Any) -> None:
        """Take in what a message says of the processes of the run."""
        if isinstance(message, Welcome):
            with contextlib.suppress(SupervisorGone):  # it is lost already: another one follows
                self._coordinator = self._substrate.kernel(COORDINATOR).find(message.pid)
        elif isinstance(message, messages.WorkerReady):
            place = message.node, message.endpoint.pid
            self._workers[place] = self._found(*place)
        elif isinstance(message, messages.EndJob):
            self._over, self._attached = True, message.attached

    def send(self, message: Message) -> None:
        """Speak to the coordinator; if it has ended, to the next one, once :meth:`receive` has found that."""
        try:
            frames.send(self._observer, message)
        except ConnectionError:
            self._unsent.append(message)

    def pace(self, heartbeat_s: float) -> None:
        """Be shown the heartbeats of a node so far apart from now on, while nothing else happens; 0: all of them."""
        self._hello = ObserverHello(heartbeat_s)
        self.send(self._hello)

    def fileno(self) -> int:
        """The descriptor that is readable when there may be a message; another one after :meth:`receive`."""
        return self._observer.fileno()

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then zygote and keeper, then workers and what they started."""
        root = self._agents[node]
        return root.kernel.tree(root)

    def root(self, node: str) -> Process:
        return self._agents[node]

    def worker(self, node: str, pid: int) -> Process:
        return self._workers.get((node, pid)) or self._found(node, pid)

    def _found(self, node: str, pid: int) -> Process:
        return self._substrate.kernel(node).find(pid)

    def coordinator(self) -> Process:
        """The process that decides membership now."""
        return self._coordinator

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Let the event loop that runs hear what supervisors tell by themselves, as long as a ``with`` lasts."""
        with contextlib.ExitStack() as hearing:
            self._hearing = hearing, set()
            for station in (COORDINATOR, *self.nodes):
                self._hear_supervisor(station)
            try:
                yield
            finally:
                self._hearing = None

    def _hear_supervisor(self, station: str) -> None:
        link = self._substrate.link(station)
        if self._hearing is not None and link not in self._hearing[1]:
            self._hearing[0].enter_context(link.heard())
            self._hearing[1].add(link)

    def provide(self, count: int) -> None:
        for number in range(len(self.nodes), count):
            node = f"node{number}"
            self._network.host(node)  # has a place for it, or says what to do
            self._start_agent(node)
            self.nodes = (*self.nodes, node)

    def restart(self, node: str) -> None:
        self.mend(node)
        self._start_agent(node)

    def _start_agent(self, node: str) -> None:
        if node in self._agents:  # whatever the one before has left behind
            self._substrate.end([(node, self._agents[node])], 0.0)
        where = self.token, self.run_directory, self._injection
        self._agents[node] = self._substrate.start_agent(self._network, node, *where)
        self._hear_supervisor(node)

    def _is_late(self, station: str) -> bool:
        """Whether the job was over before the agent of a node had connected to its coordinator."""
        return self._attached is not None and station not in (COORDINATOR, *self._attached)

    def end(self) -> None:
        """End every process of the run, and wait until they are gone."""
        self._observer.close()
        self._release()
        programs = [(COORDINATOR, self._first_coordinator), *self._agents.items()]
        with contextlib.ExitStack() as ended:
            ended.callback(self._close_backends)
            ended.callback(self._network.close)
            ended.callback(self._substrate.collect, self.run_directory)
            # agents that came too late would look for a coordinator that is gone
            self._substrate.end([each for each in programs if self._is_late(each[0])], 0.0)
            self._substrate.end(
                [each for each in programs if not self._is_late(each[0])],
                _FAREWELL_S if self._over else 0.0,
            )
        deadline_s = time.monotonic() + _END_S
        while left := [process.pid for process in self._workers.values() if not _is_gone(process)]:
            if time.monotonic() > deadline_s:
                raise HarnessError(f"processes {left} of the run did not end")
            time.sleep(0.002)
