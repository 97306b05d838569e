"""The operations of a cluster that need a coordinator, for nodes that have none.

-> substrate/core/base.py: what they do on the nodes of a job.
"""

from __future__ import annotations

from typing import Any, NoReturn

from chaoskit.errors import HarnessError
from chaoskit.substrate.core.processes import Process
from chaoskit.wire.messages import Message


class WithoutCoordinator:
    """Nodes without a coordinator: each operation that needs one raises HarnessError.

    Attributes:
        address, token, store_port: empty or 0.
    """

    address = ("", 0)
    token = ""
    store_port = 0

    def receive(self, timeout_s: float) -> Any | None:
        return _no_coordinator()

    def fileno(self) -> int:
        return _no_coordinator()

    def pace(self, heartbeat_s: float) -> None:
        _no_coordinator()

    def send(self, message: Message) -> None:
        _no_coordinator()

    def coordinator(self) -> Process:
        return _no_coordinator()

    def worker(self, node: str, pid: int) -> Process:
        return _no_coordinator()

    def restart(self, node: str) -> None:
        _no_coordinator()

    def provide(self, count: int) -> None:
        _no_coordinator()


def _no_coordinator() -> NoReturn:
    """Raise the HarnessError of an operation that needs a coordinator. Never returns."""
    raise HarnessError("a command has no coordinator")
