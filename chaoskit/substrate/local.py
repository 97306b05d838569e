"""Substrate ``local``: every node is a process tree on this host."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaoskit import messages, wire
from chaoskit.config import RunConfig
from chaoskit.control.agent import AgentSpec
from chaoskit.control.coordinator import CoordinatorSpec
from chaoskit.errors import HarnessError, Refused
from chaoskit.injection_line import InjectionDoor
from chaoskit.messages import Message, ObserverHello, Welcome
from chaoskit.osprocess import await_readable, is_ending, process_name, start_ticks
from chaoskit.substrate import abilities
from chaoskit.substrate.actions import Action, Backend
from chaoskit.substrate.bare import BareCluster
from chaoskit.substrate.base import NOTHING, Needs, Process
from chaoskit.substrate.disks import Disks
from chaoskit.substrate.extensions import BackendPlace, brought_backends
from chaoskit.substrate.holds import Holds
from chaoskit.substrate.levers import Levers, live_tree, signal_same
from chaoskit.substrate.network import COORDINATOR, Loopback, Network
from chaoskit.substrate.nursery import EndProcesses, StartAgent, StartCommand, StartCoordinator
from chaoskit.substrate.traffic import Change
from chaoskit.substrate.undo import EndEntry, UndoLog, sweep
from chaoskit.substrate.warden import WardenSpec

_WARM_S = 120.0
_END_S = 10.0
_FAREWELL_S = 3.0


class LocalSubstrate:
    """Keeps one warm nursery, from which the processes of every run are forked.

    Attributes:
        undo: what must be put back if this process is killed.
    """

    name = "local"

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        sweep()  # what runs that were killed have left behind
        self.undo = UndoLog()

    def warm_up(self) -> None:
        """Start the nursery, if there is none; it imports torch, which takes seconds."""
        if self._nursery is not None and self._nursery.poll() is None:
            return
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self._nursery = subprocess.Popen(
            [*self._prefix(), sys.executable, "-m", "chaoskit.substrate.nursery"],
            stdin=theirs.fileno(),
            stdout=2,  # standard output may be read by a machine
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.undo.plan(EndEntry(self._nursery.pid, start_ticks(self._nursery.pid)))
        if self._ask(None) != b"ready":
            raise HarnessError("the nursery process did not start; see its output above")

    def _prefix(self) -> list[str]:
        """What the nursery is started through."""
        return []

    def _network(self, nodes: Sequence[str], port: int) -> Network:
        return Loopback(port)

    def _enter_mounts(self, pid: int) -> list[str]:
        """What a command is started through that is to see the mounts of another process."""
        return ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]

    def _ask(self, request: bytes | None, *descriptors: int) -> bytes:
        if request is not None:
            socket.send_fds(self._connection, [request], list(descriptors))
        readable = await_readable([self._connection.fileno()], _WARM_S)
        return self._connection.recv(4096) if readable else b""

    def _start(self, request: msgspec.Struct, *descriptors: int) -> int:
        reply = self._ask(msgspec.json.encode(request), *descriptors)
        if not reply:
            raise HarnessError("the nursery process is gone")
        return int(reply)

    def launch(
        self,
        config: RunConfig,
        run_directory: Path,
        *,
        port: int = 0,
        heartbeat_s: float = 0.0,
        replacements: int = 0,
        injection: InjectionDoor | None = None,
    ) -> LocalCluster:
        """Start coordinator and agents.

        Raises:
            BadInput: if ``port`` is in use.
        """
        self.warm_up()
        nodes = node_names(config.nodes)
        network = self._network(node_names(config.nodes_max), port)
        token = secrets.token_hex(16)
        coordinator = CoordinatorSpec(config, token, str(run_directory))
        with network.listeners[0] as first, network.listeners[1] as second:
            start = StartCoordinator(coordinator)
            pids = [self._start(start, first.fileno(), second.fileno(), *network.namespace(COORDINATOR))]
        try:
            hello = ObserverHello(heartbeat_s)
            observer = attach(network, token, hello)
            for node in nodes:
                pids.append(self.start_agent(network, node, token, run_directory, injection))  # noqa: PERF401 - see below
        except (OSError, Refused) as error:
            # The nursery would start a coordinator that ends at its start again and again.
            self.end(pids, 0.0)
            network.close()
            log = run_directory / "log" / "coordinator.log"
            raise HarnessError(f"the coordinator ended while it started ({error}): see {log}") from error
        return self._cluster(network, observer, token, pids, nodes, run_directory, hello, injection)

    def _cluster(self, *arguments: Any) -> LocalCluster:
        return LocalCluster(self, *arguments)

    def backends(self, cluster: Levers) -> Iterable[Backend]:
        """What carries out actions on the nodes of a run, beside its network."""
        yield Holds(self.undo, cluster.node, cluster.run_directory)
        yield Disks(self.undo, self._enter_mounts, cluster.first_pid)
        yield from brought_backends(BackendPlace(self.name, self.undo, cluster.node, cluster.run_directory))

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes from here; "" if it can."""
        if issubclass(action, Change):
            return f"nodes of the substrate {self.name} have no networks of their own"
        return abilities.why_not(action)

    def start_agent(
        self, network: Network, node: str, token: str, run_directory: Path, injection: InjectionDoor | None
    ) -> int:
        """Start an agent of a run. Gives its pid."""
        agent = AgentSpec(
            node, network.host(node), network.address, network.store, token, str(run_directory), injection
        )
        return self._start(StartAgent(agent), *network.namespace(node))

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        """Nodes on which commands can be started, and nothing runs yet. They see all directories of this host."""
        self.warm_up()
        names = node_names(nodes)
        return self._bare_cluster(self._network(names, 0), names, run_directory)

    def _bare_cluster(self, *arguments: Any) -> BareCluster:
        return BareCluster(self, *arguments)

    def start_command(self, spec: WardenSpec, namespace: tuple[int, ...]) -> int:
        """Start a node's command, in a network namespace if one is given. Gives the pid of its warden."""
        return self._start(StartCommand(spec), *namespace)

    def environment(self) -> Mapping[str, str]:
        """What a command finds there, if nobody tells it more."""
        return os.environ

    def end(self, pids: list[int], patience_s: float) -> None:
        """SIGKILL these processes of the nursery, if they do not end by themselves, and everything below them."""
        self._start(EndProcesses(tuple(pids), patience_s))

    def close(self) -> None:
        """End the nursery, and with it everything that it started."""
        if self._nursery is not None:
            self._connection.close()
            try:
                self._nursery.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._nursery.kill()
                self._nursery.wait()
            self._nursery = None
        self.undo.close()


def node_names(count: int) -> tuple[str, ...]:
    """Of a run's nodes."""
    return tuple(f"node{number}" for number in range(count))


def attach(network: Network, token: str, hello: ObserverHello) -> socket.socket:
    """An observer's connection to the coordinator. Raises OSError, Refused."""
    connection = network.connect()
    try:
        wire.introduce(connection, token)
        wire.send(connection, hello)
    except BaseException:
        connection.close()
        raise
    return connection


_ALL = ObserverHello()


class LocalCluster(Levers):
    """One run's processes."""

    def __init__(
        self,
        substrate: LocalSubstrate,
        network: Network,
        observer: socket.socket,
        token: str,
        pids: list[int],
        nodes: tuple[str, ...],
        run_directory: Path,
        hello: ObserverHello = _ALL,
        injection: InjectionDoor | None = None,
    ) -> None:
        super().__init__(network, nodes, run_directory, substrate.backends)
        self._substrate, self._hello, self._observer, self._injection = substrate, hello, observer, injection
        self.address, self.token, self.store_port = network.address, token, network.store[1]
        self._pids = pids
        self._ticks = {pid: start_ticks(pid) for pid in pids}
        self.coordinator_pid = pids[0]
        self._workers: dict[int, int | None] = {}  # pid -> start time
        self._splitter = wire.Splitter()
        self._over = False  # agents are ending by themselves, and write down how their workers ended
        self._inbox: list[Any] = []
        self._unsent: list[Message] = []  # for the next coordinator

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""
        deadline_s = time.monotonic() + timeout_s
        while not self._inbox:
            if not await_readable([self._observer.fileno()], max(0.0, deadline_s - time.monotonic())):
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
        except ConnectionError:
            return b""

    def _attach(self) -> None:
        """Find the coordinator that takes over; its port stays open meanwhile."""
        self._observer.close()
        self._splitter = wire.Splitter()
        unsent, self._unsent = self._unsent, []
        try:
            self._observer = attach(self._network, self.token, self._hello)
            for message in unsent:
                wire.send(self._observer, message)
        except (OSError, Refused) as error:
            raise ConnectionError(f"the coordinator is gone, and no other took over: {error}") from error

    def observe(self, message: Any) -> None:
        """Take in what a message says of the processes of the run."""
        if isinstance(message, Welcome):
            self.coordinator_pid = message.pid
            self._ticks[message.pid] = start_ticks(message.pid)
        elif isinstance(message, messages.WorkerReady):
            pid = message.endpoint.pid
            self._workers[pid] = start_ticks(pid)
        elif isinstance(message, messages.EndJob):
            self._over = True

    def send(self, message: Message) -> None:
        """Speak to the coordinator; if it has ended, to the next one, once :meth:`receive` has found that."""
        try:
            wire.send(self._observer, message)
        except ConnectionError:
            self._unsent.append(message)

    def fileno(self) -> int:
        """The descriptor that is readable when there may be a message; another one after :meth:`receive`."""
        return self._observer.fileno()

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a worker, which must still be the process that it was when it reported for duty."""
        signal_same(pid, self._workers.get(pid), signum, "a worker")

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then zygote and keeper, then workers and what they started."""
        pid = self.first_pid(node)
        return live_tree(pid, self._ticks[pid])

    def first_pid(self, node: str) -> int:
        return self._pids[1 + int(node.removeprefix("node"))]

    def coordinator(self) -> Process:
        """The process that decides membership now."""
        pid = self.coordinator_pid
        return Process(pid, self._ticks[pid], process_name(pid))

    def provide(self, count: int) -> None:
        for node in node_names(count)[len(self.nodes) :]:
            self._network.host(node)  # has a place for it, or says what to do
            self._pids.append(self._start_agent(node))
            self.nodes = (*self.nodes, node)

    def replace(self, node: str) -> None:
        self.mend(node)
        self._pids[1 + self.nodes.index(node)] = self._start_agent(node)

    def _start_agent(self, node: str) -> int:
        pid = self._substrate.start_agent(self._network, node, self.token, self.run_directory, self._injection)
        self._ticks[pid] = start_ticks(pid)
        return pid

    def end(self) -> None:
        """End every process of the run, and wait until they are gone."""
        self._observer.close()
        self._release()
        self._substrate.end(self._pids, _FAREWELL_S if self._over else 0.0)
        self._network.close()
        self._close_backends()
        deadline_s = time.monotonic() + _END_S
        while left := [pid for pid, ticks in self._workers.items() if start_ticks(pid) == ticks and not is_ending(pid)]:
            if time.monotonic() > deadline_s:
                raise HarnessError(f"processes {left} of the run did not end")
            time.sleep(0.002)
