"""Substrate ``local``: every node is a process tree on this host.

-> ``cluster/supervised.py``: how a run begins and ends. ``limits/capabilities.py``: which faults
this machine supports. ``netns/substrate.py``: nodes with networks of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

from chaoskit.errors import HarnessError
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.cluster.network import Loopback, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.substrate.core.actions import Action, Backend
from chaoskit.substrate.core.extensions import BackendPlace, external_backends
from chaoskit.substrate.core.traffic import Change
from chaoskit.substrate.disk.disks import Disks
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.limits.holds import Holds, ProcessHolds
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import EndEntry, UndoLog

_END_S = 10.0


class LocalSupervisor:
    """The warm supervisor on this host, from which the processes of every run are forked.

    Attributes:
        link: the link to its process; set by :meth:`start`.
    """

    link: SupervisorLink

    def __init__(self, undo: UndoLog) -> None:
        self._undo = undo
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, prefix: Sequence[str] = ()) -> None:
        """Start the supervisor, unless it runs. Raises HarnessError if it does not start.

        Args:
            prefix: the command that starts it indirectly; empty to start it directly.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        launcher_end, supervisor_end = socket.socketpair()
        self.link = SupervisorLink(launcher_end, "the supervisor")
        environment = dict(
            os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"
        )
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "chaoskit.substrate.supervisor"],
            stdin=supervisor_end.fileno(),
            stdout=2,  # standard output may be read by a machine
            env=environment,
            start_new_session=True,
        )
        supervisor_end.close()
        self._undo.plan(EndEntry(self._process.pid, start_ticks(self._process.pid)))
        if not self.link.await_ready():
            self.close()
            raise HarnessError("the supervisor did not start; see its output above")

    def close(self) -> None:
        """End the supervisor and everything below it, and wait for its end."""
        if self._process is not None:
            self.link.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


class LocalSubstrate(SupervisedSubstrate):
    """A substrate with one warm supervisor, from which the processes of every run are forked."""

    name = "local"

    def __init__(self) -> None:
        super().__init__()
        self._supervisor = LocalSupervisor(self.undo)

    def warm_up(self) -> None:
        self._supervisor.start()

    def link(self, station: str) -> SupervisorLink:
        return self._supervisor.link

    def network(self, nodes: Sequence[str], port: int) -> Network:
        return Loopback(port)

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        return host_backends(self, cluster, enter_mounts)

    def why_not(self, action: type[Action]) -> str:
        """Return the reason why nodes of this substrate do not support an action; "" if they do."""
        if issubclass(action, Change):
            return f"nodes of the substrate {self.name} have no networks of their own"
        return capabilities.why_not(action)

    def close(self) -> None:
        """End the supervisor and everything that it started."""
        self._supervisor.close()
        super().close()


def host_backends(
    substrate: SupervisedSubstrate, cluster: BaseCluster, enter: Callable[[int], list[str]]
) -> Iterable[Backend]:
    """Yield the backends of actions on nodes that are process trees on this host.

    Args:
        enter: returns the command that runs another one in the mount namespace of a pid.
    """
    yield Holds(substrate.undo, cluster.node, cluster.run_directory)
    yield ProcessHolds(substrate.undo)
    yield Disks(substrate.undo, enter, cluster.root)
    yield from external_backends(
        BackendPlace(substrate.name, substrate.undo, cluster.node, cluster.run_directory)
    )


def enter_mounts(pid: int, nsenter: Sequence[str] = ("nsenter",)) -> list[str]:
    """Return the command that runs another one in the mount namespace of process ``pid``.

    Args:
        nsenter: the command ``nsenter``, with options that enter further namespaces.
    """
    return [*nsenter, f"--mount=/proc/{pid}/ns/mnt"]
