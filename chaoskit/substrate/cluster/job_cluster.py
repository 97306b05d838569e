"""A run of a job: its coordinator, its nodes, and the messages of its coordinator.

-> ``cluster/supervised.py``: how agents and coordinator are started. ``cluster/nodes.py``: how a
node is lost. ``coordinator/handlers/on_node.py``: when the coordinator considers a node lost.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from chaoskit.errors import HarnessError, NodeUnreachable, Refused
from chaoskit.process.linux import await_readable, describe_status
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.node_files import NodeFiles
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.core.actions import Backend
from chaoskit.substrate.core.processes import Kernel, Process
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.wire import frames, messages
from chaoskit.wire.injection_line import InjectionDoor
from chaoskit.wire.messages import Message, ObserverHello, Welcome

_END_S = 10.0
_FAREWELL_S = 3.0
_MOVES = 3  # attempts to find a coordinator whose machines are lost one after the other


class StartsAgents(Protocol):
    """Protocol of a substrate that starts and ends the agents of a run.

    A station is a node or the coordinator: the name of the node, or ``COORDINATOR``.
    """

    @property
    def files(self) -> NodeFiles:
        """The files of the run on its nodes."""

    def link(self, station: str) -> SupervisorLink:
        """Return the link to the supervisor of a node or the coordinator.

        Raises NodeUnreachable if there is none any more.
        """

    def kernel(self, station: str) -> Kernel:
        """Return the kernel that runs the processes of a node or the coordinator.

        Raises NodeUnreachable if there is no such node any more.
        """

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        """Return the backends of actions on the nodes, without those of the network."""

    def kill(self, node: str) -> None:
        """Kill the container or pod of a node, if it has one. Raises HarnessError if that fails."""

    def start_agent(
        self,
        network: Network,
        node: str,
        token: str,
        run_directory: Path,
        injection: InjectionDoor | None,
    ) -> Process:
        """Start an agent of the run and return its process. Raises HarnessError if that fails.

        Args:
            injection: endpoint at which processes of the node reach the harness; None for none.
        """

    def end(self, programs: Iterable[tuple[str, Process]], patience_s: float) -> None:
        """End programs and all processes below them, and wait until they are gone.

        Processes that do not end in time are left, and nothing is raised for them.

        Args:
            programs: each with its node or ``COORDINATOR``.
            patience_s: time that the programs get to end by themselves.
        """


def attach(network: Network, token: str, hello: ObserverHello) -> socket.socket:
    """Return an observer's connection to the coordinator, after its hello has been sent.

    Raises OSError or HarnessError if the connection fails, and Refused if the token is wrong.
    """
    connection = network.connect()
    try:
        frames.introduce(connection, token)
        frames.send(connection, hello)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_gone(process: Process) -> bool:
    """Return whether a process is known to be gone.

    A node that is being removed may not report it at once.
    """
    with contextlib.suppress(NodeUnreachable):
        return process.is_gone()
    return False


_ALL = ObserverHello()


class JobCluster(BaseCluster):
    """The processes of a run of a job, and the observer's connection to its coordinator.

    Args:
        observer: connection of :func:`attach`, on which ``hello`` was sent.
        agents: process of each node's agent, by node.
        injection: endpoint at which processes of nodes that start later reach the harness.
        coordinator_again: starts the coordinator on another machine if its own is lost, so that
            the given nodes reach it. It returns its process, or None if it started none.
    """

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
        super().__init__(network, tuple(agents), run_directory, substrate.backends, substrate.kill)
        self._substrate, self._hello, self._observer, self._injection = (
            substrate,
            hello,
            observer,
            injection,
        )
        self.address, self.token, self.store_port = network.address, token, network.store[1]
        # first: the process that the substrate started on the current machine, to be ended there
        self._first_coordinator, self._coordinator = coordinator, coordinator
        self._coordinator_again = coordinator_again
        self._agents = agents
        self._workers: dict[tuple[str, int], Process] = {}  # node, pid
        self._listening: tuple[contextlib.ExitStack, set[SupervisorLink]] | None = None
        self._splitter = frames.FrameSplitter()
        # nodes that had connected when the job ended; None until then
        self._attached: tuple[str, ...] | None = None
        self._over = False  # agents end by themselves, and record how their workers ended
        self._inbox: list[Any] = []
        self._unsent: list[Message] = []  # messages for the next coordinator

    def receive(self, timeout_s: float) -> Any | None:
        """Return the next message of the coordinator, or None if none came in time.

        What the message says about processes is noted (:meth:`observe`). If the coordinator has
        ended before the job, the call first connects to the next one, which may take longer than
        ``timeout_s``.

        Raises:
            ConnectionError: if the coordinator is gone and the job is over, or no other coordinator
                takes over.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._inbox:
            if not await_readable(
                [self._observer.fileno()], max(0.0, deadline_s - time.monotonic())
            ):
                return None
            if data := self._read():
                self._inbox += self._splitter.feed(data)
            elif self._over:
                raise ConnectionError("the coordinator is gone")
            else:
                self._attach()
        message = self._inbox.pop(0)
        self.observe(message)
        return message

    def _read(self) -> bytes:
        """Return the bytes that the coordinator has sent, or b"" if the connection is over."""
        try:
            return self._observer.recv(65536)
        except OSError:
            return b""

    def _attach(self) -> None:
        """Connect to the coordinator that takes over, and send it the unsent messages.

        Its port stays open meanwhile, unless its machine is lost. A lost machine is replaced up to
        three times. Raises ConnectionError if no coordinator takes over.
        """
        self._observer.close()
        self._splitter = frames.FrameSplitter()
        unsent, self._unsent = self._unsent, []
        try:
            self._move_coordinator()  # a machine that is known to be lost need not be dialed
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
                f"{self._describe_end()}, and no other took over: {error}"
            ) from error

    def _move_coordinator(self) -> bool:
        """Start a coordinator on another machine if its own is lost.

        Return False if the machine is not lost or there is no other one. Return True if another
        attempt to connect makes sense: also if the new machine is lost as well. Raises HarnessError
        if no coordinator can start.
        """
        try:
            process = self._coordinator_again(self.nodes)
            if process is None:
                return False
            self._first_coordinator = self._coordinator = process
            self.address, self.store_port = self._network.address, self._network.store[1]
            self._listen_to_supervisor(COORDINATOR)
        except NodeUnreachable:
            pass
        return True

    def _describe_end(self) -> str:
        """Return a phrase about the end of the last coordinator, with its exit status if known."""
        status = None
        with contextlib.suppress(NodeUnreachable):  # its exit status is unknown
            link = self._substrate.link(COORDINATOR)
            status = link.exits.get(self._coordinator.pid) if link.is_open() else None
        return "the coordinator is gone" + (
            f" ({' '.join(describe_status(status))})" if status is not None else ""
        )

    def observe(self, message: Any) -> None:
        """Note what a message says about processes of the run.

        These are the current coordinator, the process of a worker, and the end of the job.
        """
        if isinstance(message, Welcome):
            with contextlib.suppress(NodeUnreachable):  # it is lost already, and another follows
                self._coordinator = self._substrate.kernel(COORDINATOR).find(message.pid)
        elif isinstance(message, messages.WorkerReady):
            worker = message.node, message.endpoint.pid
            self._workers[worker] = self._find_worker(*worker)
        elif isinstance(message, messages.EndJob):
            self._over, self._attached = True, message.attached

    def send(self, message: Message) -> None:
        """Send a message to the coordinator.

        If it has ended, the next one gets the message once :meth:`receive` connects to it. Raises
        OSError if the connection fails for another reason.
        """
        try:
            frames.send(self._observer, message)
        except ConnectionError:
            self._unsent.append(message)

    def pace(self, heartbeat_s: float) -> None:
        """Send the coordinator the least interval between heartbeats of a node that it forwards.

        It applies while nothing else happens; 0 forwards all. Later coordinators get it, too.
        """
        self._hello = ObserverHello(heartbeat_s)
        self.send(self._hello)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message may be available.

        It may change after :meth:`receive`.
        """
        return self._observer.fileno()

    def node(self, node: str) -> list[Process]:
        """Return the live processes of a node.

        Its agent comes first, then zygote and keeper, then workers and their children.
        """
        root = self._agents[node]
        return root.kernel.tree(root)

    def root(self, node: str) -> Process:
        return self._agents[node]

    def worker(self, node: str, pid: int) -> Process:
        return self._workers.get((node, pid)) or self._find_worker(node, pid)

    def _find_worker(self, node: str, pid: int) -> Process:
        """Return the process that has this pid on a node now.

        If no process has it, the result has no start time (``ticks`` is None).
        """
        return self._substrate.kernel(node).find(pid)

    def coordinator(self) -> Process:
        """Return the process of the current coordinator."""
        return self._coordinator

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Let the running event loop handle unasked messages of supervisors inside a ``with``.

        Raises NodeUnreachable on entry if one of them is gone.
        """
        with contextlib.ExitStack() as stack:
            self._listening = stack, set()
            for station in (COORDINATOR, *self.nodes):
                self._listen_to_supervisor(station)
            try:
                yield
            finally:
                self._listening = None

    def _listen_to_supervisor(self, station: str) -> None:
        """Let the event loop read a supervisor's messages, if :meth:`heard` is active.

        Raises NodeUnreachable if the supervisor is gone.
        """
        link = self._substrate.link(station)
        if self._listening is not None and link not in self._listening[1]:
            self._listening[0].enter_context(link.heard())
            self._listening[1].add(link)

    def provide(self, count: int) -> None:
        for number in range(len(self.nodes), count):
            node = f"node{number}"
            self._network.host(node)  # raises if there is no place for the node
            self._start_agent(node)
            self.nodes = (*self.nodes, node)

    def restart(self, node: str) -> None:
        self.reconnect(node)
        self._start_agent(node)

    def _start_agent(self, node: str) -> None:
        """End all processes of a node's earlier agent, and start another one under its name.

        Raises HarnessError if it does not start.
        """
        if node in self._agents:
            self._substrate.end([(node, self._agents[node])], 0.0)
        arguments = self.token, self.run_directory, self._injection
        self._agents[node] = self._substrate.start_agent(self._network, node, *arguments)
        self._listen_to_supervisor(node)

    def _is_late(self, station: str) -> bool:
        """Return whether the job ended before a node's agent had connected to the coordinator."""
        return self._attached is not None and station not in (COORDINATOR, *self._attached)

    def end(self) -> None:
        """End every process of the run, and wait until all are gone.

        After the end of the job, programs have 3 s to end by themselves. Journals and logs are then
        collected, and the network is removed. Raises HarnessError if a worker does not end in 10 s,
        or journals or logs cannot be stored here.
        """
        self._observer.close()
        self._release()
        programs = [(COORDINATOR, self._first_coordinator), *self._agents.items()]
        with contextlib.ExitStack() as ended:
            ended.callback(self._close_backends)
            ended.callback(self._network.close)
            ended.callback(self._substrate.files.collect, self.run_directory)
            # late agents would look for a coordinator that is gone
            self._substrate.end([program for program in programs if self._is_late(program[0])], 0.0)
            self._substrate.end(
                [program for program in programs if not self._is_late(program[0])],
                _FAREWELL_S if self._over else 0.0,
            )
        deadline_s = time.monotonic() + _END_S
        while pids := [process.pid for process in self._workers.values() if not _is_gone(process)]:
            if time.monotonic() > deadline_s:
                raise HarnessError(f"processes {pids} of the run did not end")
            time.sleep(0.002)
