"""The network of a run, as its launcher sees it.

-> ``netns/substrate.py``: a network with a link for each node, which can be cut and measured.
``core/traffic.py``: changes to the traffic.
"""

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

#: Name of the coordinator's station. A station is a node or the coordinator, as a network sees it.
COORDINATOR = "coordinator"
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
_NO_ECHOES = "all nodes share one network: the round trips between two nodes cannot be measured"


class Network(Protocol):
    """Protocol of the network in which the processes of a run find each other.

    Attributes:
        address: address of the coordinator's listener for agents and observers.
        store: address of the coordinator's listener for its store.
        interface: name of a node's link to the others.
    """

    address: tuple[str, int]
    store: tuple[str, int]
    interface: str

    @property
    def listeners(self) -> tuple[socket.socket | Listener, socket.socket | Listener]:
        """The coordinator's sockets: for agents and observers, and for its store."""

    def host(self, name: str) -> str:
        """Return the address under which others reach a node.

        Raises HarnessError if the network has no place for the node.
        """

    def namespace(self, name: str) -> tuple[int, ...]:
        """Return the descriptor of a station's own network namespace, alone in a tuple.

        The tuple is empty if the station has none. The network closes the descriptor.
        """

    def isolate(self, name: str) -> Applied | None:
        """Drop all packets from and to a node, and return the handle that counts and lifts this.

        Return None where all nodes share a network. The count stays 0 where the kernel takes the
        link down, as it counts no packets then. Raises HarnessError if the node cannot be isolated.
        """

    def backends(self) -> Sequence[Backend]:
        """Return the backends of changes to the network; none where all nodes share a network."""

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        """Send ``count`` echoes, and return the round trips of those answered in ``timeout_s``.

        They go from node ``source`` to node ``target``, one after the other. Raises HarnessError if
        all nodes share one network, or no socket for echoes can be opened.
        """

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        """Start to measure round trips continuously, and return the probe.

        It measures until it is closed. Raises HarnessError as :meth:`round_trips_ms`.
        """

    def connect(self) -> socket.socket:
        """Return a new connection of the harness to the coordinator.

        Raises OSError if the coordinator does not accept it, and HarnessError if it cannot be made.
        """

    def close(self) -> None:
        """Release the resources of the network: its namespaces, links and changes, if any.

        Raises HarnessError if that fails.
        """


class PlainNetwork:
    """Base of networks that all nodes share unchanged: no link can be cut, changed or measured.

    Measurements raise HarnessError.
    """

    def namespace(self, name: str) -> tuple[int, ...]:
        return ()

    def isolate(self, name: str) -> Applied | None:
        return None

    def backends(self) -> Sequence[Backend]:
        return ()

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        raise HarnessError(_NO_ECHOES)

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        raise HarnessError(_NO_ECHOES)

    def close(self) -> None:
        """Do nothing: a shared network has no resources to release."""


class Loopback(PlainNetwork):
    """A network in which all nodes have the loopback address.

    Raises BadInput if ``port`` is in use.
    """

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
