"""The harness's end of the sockets to workers and checkpoint daemons, which stop at hooks and
inject faults there.

-> runtime/step/hooks.py is the other end in a worker: the rank waits there until it is released.
daemon/injection.py: the other end in a checkpoint daemon. wire/injection_line.py: the connection.
experiment/injection/job_follower.py matches each waiting rank with its fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from chaoskit.process.linux import socket_name
from chaoskit.wire.injection_line import InjectionDoor, InjectionLine
from chaoskit.wire.messages import (
    ArmTriggers,
    InjectionHello,
    InjectionOrder,
    InjectionReport,
    Trigger,
)

_WAITING_MAX = 1024  # connections that wait while the harness starts the run
_TRIGGERS_MAX = 200  # in one message
NAME = "injection"


class InjectionChannel:
    """The socket of a run, to which workers and checkpoint daemons connect.

    Close it after the run.

    Args:
        directory: the directory of the run.
        triggers: the hooks of the plan at which ranks stop and wait for their faults.

    Attributes:
        door: the address and token with which workers and checkpoint daemons connect.
    """

    def __init__(self, directory: Path, triggers: tuple[Trigger, ...]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path, self._triggers = directory / NAME, triggers
        self.door = InjectionDoor(str(self._path), secrets.token_hex(16))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with socket_name(self._path) as name:
            self._listener.bind(name)
        self._path.chmod(0o600)
        self._listener.listen(_WAITING_MAX)
        # (node, worker) -> connection; the worker "" is the node's checkpoint daemon
        self._lines_by_process: dict[tuple[str, str], InjectionLine] = {}
        self._open_lines: set[InjectionLine] = set()
        # node -> triggers for the workers that it starts from now on
        self._node_triggers: dict[str, list[Trigger]] = {}
        self._on_report: Callable[[InjectionReport], None] = lambda report: None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, on_report: Callable[[InjectionReport], None]) -> None:
        """Begin to accept connections, and return at once.

        Args:
            on_report: receives each report of a worker or daemon, in the running event loop; not the
                InjectionHello that begins a connection.
        """
        self._on_report, self._loop = on_report, asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept, self._loop)

    def close(self) -> None:
        """Close all connections, close and remove the socket; a rank that waits at a hook goes on."""
        if self._loop is not None:
            self._loop.remove_reader(self._listener)
        for line in list(self._open_lines):
            self._disconnect(line)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    # -- orders ------------------------------------------------------------------------------------

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        """Send an order to a worker, or without one to the checkpoint daemon of ``node``.

        Returns:
            True if the order was sent; False if that process is not connected, or does not read its
            orders.
        """
        line = self._lines_by_process.get((node, worker))
        return line is not None and line.send(order)

    def arm_node(self, node: str, trigger: Trigger) -> None:
        """Have every worker that ``node`` starts from now on stop at ``trigger``.

        Workers that are connected already receive nothing.
        """
        self._node_triggers.setdefault(node, []).append(trigger)

    # -- reports -----------------------------------------------------------------------------------

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept every waiting connection and read from it in ``loop``."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                line = InjectionLine(connection, InjectionReport)
                self._open_lines.add(line)
                loop.add_reader(line, self._receive, line)

    def _receive(self, line: InjectionLine) -> None:
        """Pass on the reports on a connection, and close the connection at its end.

        A connection is also closed if it does not begin with an InjectionHello, or after a message
        that cannot be read.
        """
        try:
            while (report := line.receive()) is not None:
                if isinstance(report, InjectionHello):
                    self._greet(line, report)
                elif line in self._lines_by_process.values():
                    self._on_report(report)
                else:
                    break  # it has not sent its InjectionHello
            self._disconnect(line)
        except BlockingIOError:
            pass

    def _greet(self, line: InjectionLine, hello: InjectionHello) -> None:
        """Register a connection by its node and worker, and send a worker its triggers.

        A newer connection of the same process replaces the older one. A connection with a wrong
        token is closed.
        """
        if not hmac.compare_digest(hello.token, self.door.token):
            self._disconnect(line)
            return
        self._lines_by_process[hello.node, hello.worker] = line
        if hello.worker:
            triggers = (*self._triggers, *self._node_triggers.get(hello.node, ()))
            for begin in range(0, len(triggers) or 1, _TRIGGERS_MAX):
                line.send(
                    ArmTriggers(
                        triggers[begin : begin + _TRIGGERS_MAX],
                        more=begin + _TRIGGERS_MAX < len(triggers),
                    )
                )

    def _disconnect(self, line: InjectionLine) -> None:
        """Close a connection and forget its process; do nothing if it is closed already."""
        if self._loop is None or line not in self._open_lines:
            return
        self._loop.remove_reader(line)
        self._open_lines.discard(line)
        self._lines_by_process = {
            process_key: open_line
            for process_key, open_line in self._lines_by_process.items()
            if open_line is not line
        }
        line.close()
