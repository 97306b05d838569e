"""A substrate of nodes that are reached by a TCP stream each.

The streams are 20 ms slow in each direction, like those to pods of another machine. Each node has
its own list of processes, and its own directory: its pids and paths mean nothing to the runner. All
that the runner does to a node, or learns of it, passes through the stream to the node's supervisor.
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.errors import HarnessError
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.cluster.bare import BareCluster
from chaoskit.substrate.cluster.job_cluster import JobCluster
from chaoskit.substrate.cluster.network import COORDINATOR, PlainNetwork
from chaoskit.substrate.cluster.node_files import RemoteFiles
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate, node_names
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.base import NOTHING, Needs
from chaoskit.substrate.supervisor.client import Listener, SupervisorLink
from chaoskit.substrate.supervisor.reception import Reception
from chaoskit.substrate.supervisor.remote_node import (
    BackendAway,
    KernelAway,
    supported_actions,
    why_not,
)
from chaoskit.substrate.undo import EndEntry, UndoLog

HOST = "127.0.0.1"
DELAY_MS = 20.0  # in each direction
_RELAY = Path(__file__).with_name("slow_relay.py")
_START_S = 120.0
_END_S = 20.0
MOUNT = Path("/srv")  # on each node: empty, and in memory; the runner has another one
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_MOUNT = ("sh", "-c", f'mount -t tmpfs none {MOUNT} && exec "$@"', "sh")


@functools.cache
def unavailable() -> str:
    """Return why there can be no such nodes here, or "" if there can."""
    tried = subprocess.run([*_APART, *_MOUNT, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


def no_clocks() -> str:
    """Return why nodes cannot have their own clocks here, or "" if they can."""
    tried = subprocess.run(
        [*_APART, *clock(7), *_MOUNT, "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


def clock(ahead_s: int) -> tuple[str, ...]:
    """Return options of ``unshare`` for a CLOCK_MONOTONIC that is ``ahead_s`` ahead of this
    machine's.
    """
    return ("--time", "--monotonic", str(ahead_s))


class FarNode:
    """A supervisor in its own list of processes, and the stream to it.

    Args:
        options: more options of ``unshare``, for further namespaces.
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
        with self._process.stdin as stdin:
            stdin.write(token.encode())
        self.kernel = KernelAway()

    def connect(self) -> None:
        """Wait until the supervisor has connected.

        It imports modules that only programs need afterwards.
        """
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
        """Wait until the supervisor can start programs."""
        if not self.link.await_ready():
            raise HarnessError(
                f"the supervisor of {self._station} did not start; see its output above"
            )

    def close(self) -> None:
        """Close the stream: the supervisor ends, with all processes below it."""
        self.link.close()
        try:
            self._process.wait(_END_S)
        finally:
            for process in (self._process, self._relay):
                process.kill()
                process.wait()


class FarSubstrate(SupervisedSubstrate):
    """Substrate that keeps a supervisor for the coordinator and for each node."""

    name = "far"
    is_elsewhere = True

    def __init__(self) -> None:
        super().__init__()
        self.files = RemoteFiles(MOUNT / "chaoskit", self.link, self.links)
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
        """Return options of ``unshare`` for a station."""
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

    def why_not(self, action: type[Action]) -> str:
        self.warm_up()
        return why_not(self.link(COORDINATOR), action)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        home = self.files.home(cluster.run_directory)
        yield BackendAway(supported_actions(self.link(COORDINATOR)), self.link, cluster.root, home)

    def bare(self, nodes: int, run_directory: Path, needs: Needs = NOTHING) -> BareCluster:
        raise HarnessError(f"the substrate {self.name} runs no commands")

    def close(self) -> None:
        while self._nodes:
            self._nodes.popitem()[1].close()
        super().close()


class ApartSubstrate(FarSubstrate):
    """A far substrate of nodes with clocks an hour apart, like machines that were not started
    together.
    """

    def options(self, station: str) -> Sequence[str]:
        hours = 5 if station == COORDINATOR else 1 + int(station.removeprefix("node"))
        return clock(3600 * hours)


class FarNetwork(PlainNetwork):
    """Network with a single address for all nodes; the harness is as far from the coordinator as
    from its supervisor.
    """

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
    """Start a relay to a port of this host, and return it with the port at which it listens."""
    command = [sys.executable, str(_RELAY), str(port), str(DELAY_MS)]
    relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    undo.plan(EndEntry(relay.pid, start_ticks(relay.pid)))
    assert relay.stdout is not None
    with relay.stdout as stdout:
        return relay, int(stdout.readline())
