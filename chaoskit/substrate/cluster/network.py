"""The network of one run, as its launcher sees it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from chaoskit.errors import HarnessError
from chaoskit.process.host_checks import require_free_port
from chaoskit.substrate.core.actions import Applied, Backend
from chaoskit.substrate.core.echo import EchoProbe
from chaoskit.substrate.supervisor.client import Listener

#: The coordinator's name in a network, beside the nodes'.
COORDINATOR = "coordinator"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_NO_WAY = "nodes share one network as it is: no way between two of them is measured"


class Network(Protocol):
    """Where the processes of one run find each other.

    Attributes:
        address, store: of the two listeners. interface: a node's link to the others.
    """

    address: tuple[str, int]
    store: tuple[str, int]
    interface: str

    @property
    def listeners(self) -> tuple[socket.socket | Listener, socket.socket | Listener]:
        """The coordinator's sockets: for agents and observers, and for its store."""

    def host(self, name: str) -> str:
        """The address under which others reach a node."""

    def namespace(self, name: str) -> tuple[int, ...]:
        """The network namespace of a node, or of the coordinator: a descriptor, or nothing where it has none."""

    def isolate(self, name: str) -> Applied | None:
        """Lose whatever goes to a node or comes from it, without a word; None where all nodes share one network."""

    def backends(self) -> Sequence[Backend]:
        """What changes the network; nothing where all nodes share one."""

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]: ...

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe: ...

    def connect(self) -> socket.socket:
        """The harness's connection to the coordinator. Raises OSError, HarnessError."""

    def close(self) -> None:
        """Let go of what belongs to the network."""


class PlainNetwork:
    """Base of networks that all nodes share as they are: nothing cuts, changes or measures a way in them."""

    def namespace(self, name: str) -> tuple[int, ...]:
        return ()

    def isolate(self, name: str) -> Applied | None:
        return None

    def backends(self) -> Sequence[Backend]:
        return ()

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        raise HarnessError(_NO_WAY)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        raise HarnessError(_NO_WAY)

    def close(self) -> None:
        """Nothing to do."""


class Loopback(PlainNetwork):
    """All nodes on one address. Raises BadInput if ``port`` is in use."""

    interface = "lo"

    def __init__(self, port: int) -> None:
        require_free_port("port", _LOOPBACK, port)
        listen = partial(socket.create_server, backlog=128)
        self.listeners = listen((_LOOPBACK, port)), listen((_LOOPBACK, 0))
        self.address, self.store = (listener.getsockname() for listener in self.listeners)

    def host(self, name: str) -> str:
        return _LOOPBACK

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, _CONNECT_S)
