"""A substrate whose nodes are reached by one TCP stream each, 20 ms away: as pods of another machine are.

Each node has a list of processes of its own, and a directory that it alone sees: its pids and paths mean nothing to the
runner. Whatever the runner knows of a node, does to it and hears of it passes through the stream to its supervisor.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR, PlainNetwork
from chaoskit.substrate.cluster.remote_nodes import AwaySubstrate
from chaoskit.substrate.cluster.supervised import node_names
from chaoskit.substrate.supervisor.client import Listener, SupervisorLink
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.substrate.supervisor.remote_node import KernelAway
from chaoskit.substrate.undo import EndEntry, UndoLog

HOST = "127.0.0.1"
DELAY_MS = 20.0  # in each direction
_RELAY = Path(__file__).with_name("slow_relay.py")
_START_S = 120.0
_END_S = 20.0
MOUNT = Path("/srv")  # of each node: empty, and in memory; the runner's is another one
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_MOUNT = ("sh", "-c", f'mount -t tmpfs none {MOUNT} && exec "$@"', "sh")


@functools.cache
def unavailable() -> str:
    """Why there can be no such nodes here; "" if there can."""
    tried = subprocess.run([*_APART, *_MOUNT, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


def no_clocks() -> str:
    """Why nodes can have no clocks of their own here; "" if they can."""
    tried = subprocess.run(
        [*_APART, *clock(7), *_MOUNT, "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


def clock(ahead_s: int) -> tuple[str, ...]:
    """Options of ``unshare`` for a CLOCK_MONOTONIC that is so far ahead of this machine's."""
    return ("--time", "--monotonic", str(ahead_s))


class FarNode:
    """A supervisor in a list of processes of its own, and the stream to it.

    Args:
        options: of ``unshare``, for what it has of its own beside that.
    """

    def __init__(self, station: str, undo: UndoLog, options: Sequence[str] = ()) -> None:
        token = secrets.token_hex(16)
        self._station, self._reception = station, Reception(HOST, token)
        self._reception.expect(station)
        self._relay, port = slow_relay(self._reception.address[1], undo)
        command = [
            sys.executable,
            "-m",
            "chaoskit.substrate.supervisor",
            "--dial",
            f"{HOST}:{port}",
        ]
        self._process = subprocess.Popen(
            [
                *_APART,
                *options,
                *_MOUNT,
                *command,
                "--place",
                station,
                "--token-file",
                "/dev/stdin",
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=2,
        )
        undo.plan(EndEntry(self._process.pid, start_ticks(self._process.pid)))
        assert self._process.stdin is not None
        with self._process.stdin as told:
            told.write(token.encode())
        self.kernel = KernelAway()

    def connect(self) -> None:
        """Wait until it has come; it imports what programs need only then."""
        arrived = self._reception.await_any([self._station], _START_S)
        self._reception.close()
        if arrived is None:
            raise HarnessError(
                f"the supervisor of {self._station} did not come; see its output above"
            )
        self.link = SupervisorLink(
            arrived[1].connection, f"the supervisor of {self._station}", self.kernel
        )
        self.kernel.reach_by(self.link)

    def await_ready(self) -> None:
        """Wait until it can start programs."""
        if not self.link.await_ready():
            raise HarnessError(
                f"the supervisor of {self._station} did not start; see its output above"
            )

    def close(self) -> None:
        """Hang up: it ends, with everything below it."""
        self.link.close()
        try:
            self._process.wait(_END_S)
        finally:
            for process in (self._process, self._relay):
                process.kill()
                process.wait()


class FarSubstrate(AwaySubstrate):
    """Keeps a supervisor for the coordinator and each node."""

    name = "far"
    files = MOUNT / "chaoskit"

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, FarNode] = {}

    def warm_up(self) -> None:
        self._stand_ready([COORDINATOR])

    def _stand_ready(self, stations: Sequence[str]) -> None:
        new = {
            station: FarNode(station, self.undo, self.options(station))
            for station in stations
            if station not in self._nodes
        }
        for node in new.values():
            node.connect()
        self._nodes |= new
        for node in new.values():
            node.await_ready()

    def options(self, station: str) -> Sequence[str]:
        """Of ``unshare``, for a station."""
        return ()

    def link(self, station: str) -> SupervisorLink:
        return self._nodes[station].link

    def links(self) -> Mapping[str, SupervisorLink]:
        return {station: node.link for station, node in self._nodes.items()}

    def kernel(self, station: str) -> KernelAway:
        return self._nodes[station].kernel

    def launch(self, config: RunConfig, run_directory: Path, **options: Any) -> JobCluster:
        self._stand_ready([COORDINATOR, *node_names(config.nodes_max)])
        return super().launch(config, run_directory, **options)

    def network(self, nodes: Sequence[str], port: int) -> FarNetwork:
        return FarNetwork(self.link(COORDINATOR), port, self.undo)

    def close(self) -> None:
        while self._nodes:
            self._nodes.popitem()[1].close()
        super().close()


class ApartSubstrate(FarSubstrate):
    """The same, and each node has a clock of its own: an hour apart, as machines are that were not started together."""

    def options(self, station: str) -> Sequence[str]:
        hours = 5 if station == COORDINATOR else 1 + int(station.removeprefix("node"))
        return clock(3600 * hours)


class FarNetwork(PlainNetwork):
    """One address for all nodes; the harness is as far from the coordinator as from its supervisor."""

    interface = "lo"

    def __init__(self, coordinator: SupervisorLink, port: int, undo: UndoLog) -> None:
        self._undo = undo
        self.listeners: tuple[Listener, Listener] = (
            coordinator.listen(HOST, port),
            coordinator.listen(HOST, 0),
        )
        self.address, self.store = (listener.address for listener in self.listeners)
        self._relay: subprocess.Popen[str] | None = None

    def host(self, name: str) -> str:
        return HOST

    def connect(self) -> socket.socket:
        if self._relay is None:
            self._relay, self._port = slow_relay(self.address[1], self._undo)
        return socket.create_connection((HOST, self._port), _START_S)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()


def slow_relay(port: int, undo: UndoLog) -> tuple[subprocess.Popen[str], int]:
    """A relay to a port of this host, and the port at which it listens."""
    command = [sys.executable, str(_RELAY), str(port), str(DELAY_MS)]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    undo.plan(EndEntry(relay.pid, start_ticks(relay.pid)))
    assert relay.stdout is not None
    with relay.stdout as said:
        return relay, int(said.readline())
