"""A driver on this machine: plans, code, records and verdicts take the same path as to another
machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

from chaoskit.errors import HarnessError
from chaoskit.experiment.remote.client import RemoteHost
from chaoskit.plaintext import tell_on_stderr
from chaoskit.process.linux import start_ticks
from chaoskit.substrate.core.demand import RunDemand
from chaoskit.substrate.supervisor.client import SupervisorLink
from chaoskit.substrate.undo import EndEntry, UndoLog, temporary_directory

_END_S = 30.0
_COMMAND = [sys.executable, "-m", "chaoskit.substrate.supervisor", "--cold"]


class LoopbackDriver:
    """A driver that knows only what the stream of its supervisor delivers.

    Args:
        substrate: the substrate from which the driver takes nodes.
    """

    def __init__(self, substrate: str = "local") -> None:
        self.substrate, self._undo = substrate, UndoLog()
        self.files, _ = temporary_directory("loopback", self._undo)
        self.process: subprocess.Popen[bytes] | None = None

    def require(self, demand: RunDemand) -> None:
        """Accept every demand."""

    def open(self, undo: UndoLog) -> SupervisorLink:
        socket_of_runner, socket_of_driver = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with socket_of_driver:
            self.process = subprocess.Popen(
                _COMMAND,
                stdin=socket_of_driver.fileno(),
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        undo.plan(EndEntry(self.process.pid, start_ticks(self.process.pid)))
        return SupervisorLink(socket_of_runner, "the supervisor of the driver")

    def do(self, name: str, machine: str) -> Callable[[], None]:
        raise HarnessError(f"{machine} is this machine: it is not broken")

    def explain_end(self) -> str:
        return ""

    def close(self) -> None:
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            finally:
                self.process.kill()
                self.process.wait()
                self.process = None


def host() -> RemoteHost:
    """Return a driver with nodes of the substrate ``local``, for ``--chaos-substrate
    support.nodes.loopback:host``.
    """
    return RemoteHost(LoopbackDriver(), tell_on_stderr)


def netns() -> RemoteHost:
    """Return a driver with nodes of the substrate ``netns``."""
    return RemoteHost(LoopbackDriver("netns"), tell_on_stderr)
