"""Substrate ``local``: every node is a process tree on this host."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from chaoskit import messages, wire
from chaoskit.config import RunConfig, require_free_port
from chaoskit.control.agent import AgentSpec
from chaoskit.control.coordinator import CoordinatorSpec
from chaoskit.errors import HarnessError, Refused
from chaoskit.messages import Message, ObserverHello, Trigger, Welcome
from chaoskit.osprocess import descendants, is_ending, kill_if_same, process_name, start_ticks
from chaoskit.substrate.base import Process
from chaoskit.substrate.nursery import EndProcesses, StartAgent, StartCoordinator
from chaoskit.substrate.undo import UndoLog, sweep

_LOOPBACK = "127.0.0.1"
_WARM_S = 120.0
_END_S = 10.0
_FAREWELL_S = 3.0


class LocalSubstrate:
    """Keeps one warm nursery, from which the processes of every run are forked."""

    name = "local"

    def __init__(self) -> None:
        self._nursery: subprocess.Popen[bytes] | None = None
        sweep()  # what launchers that were killed have left behind
        self._undo = UndoLog()

    def warm_up(self) -> None:
        """Start the nursery, if there is none; it imports torch, which takes seconds."""
        if self._nursery is not None and self._nursery.poll() is None:
            return
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "chaoskit.substrate.nursery"],
            stdin=theirs.fileno(),
            stdout=2,  # standard output may be read by a machine
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._undo.plan("kill", pid=self._nursery.pid, ticks=start_ticks(self._nursery.pid))
        if self._ask(None) != b"ready":
            raise HarnessError("the nursery process did not start; see its output above")

    def _ask(self, request: bytes | None, *descriptors: int) -> bytes:
        if request is not None:
            socket.send_fds(self._connection, [request], list(descriptors))
        readable, _, _ = select.select([self._connection], [], [], _WARM_S)
        return self._connection.recv(4096) if readable else b""

    def _start(self, request: msgspec.Struct, *descriptors: int) -> int:
        reply = self._ask(msgspec.json.encode(request), *descriptors)
        if not reply:
            raise HarnessError("the nursery process is gone")
        return int(reply)

    def launch(
        self, config: RunConfig, triggers: tuple[Trigger, ...], run_directory: Path, *, port: int = 0
    ) -> LocalCluster:
        """Start coordinator and agents.

        Raises:
            BadInput: if ``port`` is in use.
        """
        require_free_port("port", _LOOPBACK, port)
        self.warm_up()
        token = secrets.token_hex(16)
        listener = socket.create_server((_LOOPBACK, port), backlog=128)
        address: tuple[str, int] = listener.getsockname()
        coordinator = CoordinatorSpec(config, triggers, token, str(run_directory))
        with listener:
            pids = [self._start(StartCoordinator(coordinator), listener.fileno())]
        try:
            observer = wire.connect(address, token)
            wire.send(observer, ObserverHello())
            for number in range(config.nodes):
                agent = AgentSpec(f"node{number}", _LOOPBACK, address, token, str(run_directory))
                pids.append(self._start(StartAgent(agent)))
        except (OSError, Refused):  # the coordinator ended at its start; the nursery would start it again and again
            self.end(pids, 0.0)
            raise
        return LocalCluster(self, observer, address, token, pids)

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
        self._undo.close()


class LocalCluster:
    """One run's processes."""

    def __init__(
        self, substrate: LocalSubstrate, observer: socket.socket, address: tuple[str, int], token: str, pids: list[int]
    ) -> None:
        self._substrate, self._observer = substrate, observer
        self.address, self.token = address, token
        self._pids = pids
        self.coordinator_pid = pids[0]
        self._workers: dict[int, int | None] = {}  # pid -> start time
        self._splitter = wire.Splitter()
        self._over = False  # agents are ending by themselves, and write down how their workers ended
        self._inbox: list[Any] = []

    def receive(self, timeout_s: float) -> Any | None:
        """The next message of the coordinator; None when none came in time. Raises ConnectionError at the end."""
        deadline_s = time.monotonic() + timeout_s
        while not self._inbox:
            readable, _, _ = select.select([self._observer], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                return None
            if data := self._hear():
                self._inbox += self._splitter.feed(data)
            elif self._over:
                raise ConnectionError("the coordinator is gone")
            else:
                self._attach()
        message = self._inbox.pop(0)
        self._note(message)
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
        try:
            self._observer = wire.connect(self.address, self.token)
            wire.send(self._observer, ObserverHello())
        except (OSError, Refused) as error:
            raise ConnectionError(f"the coordinator is gone, and no other took over: {error}") from error

    def _note(self, message: Any) -> None:
        if isinstance(message, Welcome):
            self.coordinator_pid = message.pid
        elif isinstance(message, messages.WorkerReady):
            pid = message.endpoint.pid
            self._workers[pid] = start_ticks(pid)
        elif isinstance(message, messages.EndJob):
            self._over = True

    def send(self, message: Message) -> None:
        """Speak to the coordinator, the next one if this one has ended."""
        try:
            wire.send(self._observer, message)
        except ConnectionError:
            self._attach()
            wire.send(self._observer, message)

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a worker, which must still be the process that it was when it reported for duty."""
        ticks = self._workers.get(pid)
        handle = os.pidfd_open(pid)
        try:
            if ticks is None or start_ticks(pid) != ticks:
                raise ProcessLookupError(f"pid {pid} is not a worker of this run any more")
            signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)

    def node(self, node: str) -> list[Process]:
        """Live processes of a node: its agent first, then its zygote, then workers and whatever they started."""
        agent = self._pids[1 + int(node.removeprefix("node"))]
        pids = [agent, *descendants(agent)]
        return [_identify(pid) for pid in pids if not is_ending(pid)]

    def coordinator(self) -> Process:
        """The process that decides membership now."""
        return _identify(self.coordinator_pid)

    def signal_process(self, process: Process, signum: int) -> None:
        """Send a signal to a process that was looked up before. Raises ProcessLookupError where it is gone."""
        if process.ticks is None or not kill_if_same(process.pid, process.ticks, signum):
            raise ProcessLookupError(f"{process.name} (pid {process.pid}) is gone")

    def end(self) -> None:
        """End every process of the run, and wait until they are gone."""
        self._observer.close()
        self._substrate.end(self._pids, _FAREWELL_S if self._over else 0.0)
        deadline_s = time.monotonic() + _END_S
        while left := [pid for pid, ticks in self._workers.items() if start_ticks(pid) == ticks and not is_ending(pid)]:
            if time.monotonic() > deadline_s:
                raise HarnessError(f"processes {left} of the run did not end")
            time.sleep(0.002)


def _identify(pid: int) -> Process:
    return Process(pid, start_ticks(pid), process_name(pid))
