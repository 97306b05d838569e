"""Substrate ``local``: every node is a process tree on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

from chaoskit.errors import HarnessError
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.cluster.network import Loopback, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.extensions import BackendPlace, brought_backends
from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.disk.disks import Disks
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.holds import Holds, ProcessHolds
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import EndEntry

_END_S = 10.0


class LocalSubstrate(SupervisedSubstrate):
    """Keeps one warm supervisor, from which the processes of every run are forked."""

    name = "local"

    def __init__(self) -> None:
        super().__init__()
        self._supervisor: subprocess.Popen[bytes] | None = None

    def warm_up(self) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            return
        self._end_supervisor()
        ours, theirs = socket.socketpair()
        self._link = SupervisorLink(ours, "the supervisor")
        environment = dict(
            os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"
        )
        self._supervisor = subprocess.Popen(
            [*self._prefix(), sys.executable, "-m", "chaoskit.substrate.supervisor"],
            stdin=theirs.fileno(),
            stdout=2,  # standard output may be read by a machine
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.undo.plan(EndEntry(self._supervisor.pid, start_ticks(self._supervisor.pid)))
        if not self._link.await_ready():
            self._end_supervisor()
            raise HarnessError("the supervisor did not start; see its output above")

    def _prefix(self) -> list[str]:
        """What the supervisor is started through."""
        return []

    def link(self, station: str) -> SupervisorLink:
        return self._link

    def network(self, nodes: Sequence[str], port: int) -> Network:
        return Loopback(port)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        yield Holds(self.undo, cluster.node, cluster.run_directory)
        yield ProcessHolds(self.undo)
        yield Disks(self.undo, self._enter_mounts, cluster.root)
        yield from brought_backends(
            BackendPlace(self.name, self.undo, cluster.node, cluster.run_directory)
        )

    def _enter_mounts(self, pid: int) -> list[str]:
        """What a command is started through that is to see the mounts of another process."""
        return ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes from here; "" if it can."""
        if issubclass(action, Change):
            return f"nodes of the substrate {self.name} have no networks of their own"
        return capabilities.why_not(action)

    def close(self) -> None:
        """End the supervisor, and with it everything that it started."""
        self._end_supervisor()
        super().close()

    def _end_supervisor(self) -> None:
        if self._supervisor is not None:
            self._link.close()
            try:
                self._supervisor.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._supervisor = None
