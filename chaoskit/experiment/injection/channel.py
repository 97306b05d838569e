"""The harness's end of the lines to workers and checkpoint daemons: where they stop, and what they do to themselves."""

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

_WAITING_MAX = 1024  # that connect while the harness starts the run
_TRIGGERS_MAX = 200  # in one message
NAME = "injection"


class InjectionChannel:
    """Listens in the directory of one run. To be closed.

    Args:
        triggers: of the plan: where ranks stop and wait for their faults.

    Attributes:
        door: what workers and checkpoint daemons must know to get in.
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
        self._lines: dict[
            tuple[str, str], InjectionLine
        ] = {}  # node, worker; "" for the node's checkpoint daemon
        self._open: set[InjectionLine] = set()
        self._armed: dict[
            str, list[Trigger]
        ] = {}  # node -> triggers for the workers that it starts from now on
        self._hear: Callable[[InjectionReport], None] = lambda report: None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, hear: Callable[[InjectionReport], None]) -> None:
        """Let them in, and give ``hear`` what they report, as long as this event loop runs."""
        self._hear, self._loop = hear, asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Hang up on all: a rank that waits goes on."""
        if self._loop is not None:
            self._loop.remove_reader(self._listener)
        for line in list(self._open):
            self._hang_up(line)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    # -- orders ---------------------------------------------------------------------------------------------------

    def tell(self, node: str, order: InjectionOrder, worker: str = "") -> bool:
        """Give an order to a worker, or to the checkpoint daemon of ``node``. False where that is not there."""
        line = self._lines.get((node, worker))
        return line is not None and line.send(order)

    def arm_node(self, node: str, trigger: Trigger) -> None:
        """Stop every worker that ``node`` starts from now on at ``trigger``."""
        self._armed.setdefault(node, []).append(trigger)

    # -- reports --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                line = InjectionLine(connection, InjectionReport)
                self._open.add(line)
                assert self._loop is not None
                self._loop.add_reader(line, self._receive, line)

    def _receive(self, line: InjectionLine) -> None:
        try:
            while (report := line.receive()) is not None:
                if isinstance(report, InjectionHello):
                    self._greet(line, report)
                elif line in self._lines.values():
                    self._hear(report)
                else:
                    break  # it has not said which it is
            self._hang_up(line)
        except BlockingIOError:
            pass

    def _greet(self, line: InjectionLine, hello: InjectionHello) -> None:
        if not hmac.compare_digest(hello.token, self.door.token):
            self._hang_up(line)
            return
        self._lines[hello.node, hello.worker] = line
        if hello.worker:
            wanted = (*self._triggers, *self._armed.get(hello.node, ()))
            for begin in range(0, len(wanted) or 1, _TRIGGERS_MAX):
                line.send(
                    ArmTriggers(
                        wanted[begin : begin + _TRIGGERS_MAX],
                        more=begin + _TRIGGERS_MAX < len(wanted),
                    )
                )

    def _hang_up(self, line: InjectionLine) -> None:
        if line not in self._open:
            return
        assert self._loop is not None
        self._loop.remove_reader(line)
        self._open.discard(line)
        self._lines = {place: other for place, other in self._lines.items() if other is not line}
        line.close()
