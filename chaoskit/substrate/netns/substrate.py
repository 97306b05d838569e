"""Substrate ``netns``: every node has a network of its own, in a namespace; so has the coordinator."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import get_args

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.core.actions import Action, Applied, Backend, Counted
from chaoskit.substrate.core.echo import Echoes, EchoProbe, EchoThread
from chaoskit.substrate.core.namespaces import INSIDE
from chaoskit.substrate.core.traffic import Block, Change, Unplug, between
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.local import LocalSubstrate
from chaoskit.substrate.netns.switch import (
    Build,
    Close,
    Connect,
    Count,
    Done,
    Impose,
    Lift,
    Listen,
    Move,
    OpenEcho,
    Switch,
)


class NetnsSubstrate(LocalSubstrate):
    """Like ``local``, with a switch process beside the supervisor."""

    name = "netns"

    def __init__(self) -> None:
        super().__init__()
        self._privileged = capabilities.privileged()
        self._switch: Switch | None = None

    def warm_up(self) -> None:
        """Start the switch and the supervisor."""
        if self._switch is None or self._switch.process.poll() is not None:
            self._switch = Switch(self.undo, privileged=self._privileged)
        super().warm_up()

    def why_not(self, action: type[Action]) -> str:
        """Why an action of this kind cannot be done to nodes from here; "" if it can."""
        return capabilities.why_not(action)

    def _prefix(self) -> list[str]:
        """The supervisor must be in the user namespace that owns the networks."""
        if self._privileged or self._switch is None:
            return []
        return [
            "nsenter",
            f"--user=/proc/{self._switch.process.pid}/ns/user",
            "--preserve-credentials",
        ]

    def network(self, nodes: Sequence[str], port: int) -> Network:
        assert self._switch is not None
        return NamespaceNetwork(self._switch, nodes, port)

    def _enter_mounts(self, pid: int) -> list[str]:
        command, *options = super()._enter_mounts(pid)
        return [*(self._prefix() or [command]), *options]

    def close(self) -> None:
        """End supervisor and switch, and with them everything that they started."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        super().close()


class NamespaceNetwork:
    """One run's network, as the launcher sees it. What goes between it and the coordinator is never cut.

    Args:
        lent: a namespace for the coordinator and each node, if there are any already; as descriptors, taken over.
    """

    interface = INSIDE

    def __init__(
        self, switch: Switch, nodes: Sequence[str], port: int, lent: Sequence[int] = ()
    ) -> None:
        self._switch = switch
        stations = (COORDINATOR, *nodes)
        built, namespaces = self.lend(Build(stations), lent)
        self._number = built.network
        self._hosts = dict(zip(stations, built.addresses, strict=True))
        self._namespaces = dict(zip(stations, namespaces, strict=True))
        self.listeners = self._listen(port), self._listen(0)
        self.address, self.store = (listener.getsockname() for listener in self.listeners)

    def lend(self, request: Build | Move, namespaces: Sequence[int]) -> tuple[Done, list[int]]:
        """Ask the switch for what needs these namespaces. They are closed here."""
        try:
            return self._switch.ask(request, *namespaces)
        finally:
            for namespace in namespaces:
                os.close(namespace)

    def _listen(self, port: int) -> socket.socket:
        _, (listener,) = self._switch.ask(Listen(self._number, COORDINATOR, port))
        return socket.socket(fileno=listener)

    def host(self, name: str) -> str:
        if name not in self._hosts:
            count = len(self._hosts) - 1
            raise HarnessError(
                f"the network was made for {count} nodes, not for {name}: raise maxReplicas"
            )
        return self._hosts[name]

    def namespace(self, name: str) -> tuple[int, ...]:
        return (self._namespaces[name],)

    def connect(self) -> socket.socket:
        try:
            _, (connection,) = self._switch.ask(Connect(self._number, COORDINATOR, self.address))
        except HarnessError as error:
            raise ConnectionError(str(error)) from error
        return socket.socket(fileno=connection)

    def isolate(self, name: str) -> Applied | None:
        if capabilities.rules():  # without rules the cable can be pulled, and nothing counts
            return self.impose(Unplug(station=name))
        return self.impose(
            Block(ways=between([name], [other for other in self._hosts if other != name]))
        )

    def backends(self) -> Sequence[Backend]:
        return (NetworkChanges(self),)

    def impose(self, change: Change) -> Counted:
        """Change the traffic, as :mod:`chaoskit.substrate.core.traffic` says it. Raises HarnessError where it
        cannot.
        """
        number = self._switch.ask(Impose(self._number, change))[0].number
        return Counted(
            lambda: self._switch.ask(Count(self._number, number))[0].packets,
            lambda: self._switch.ask(Lift(self._number, number))[0].packets,
        )

    def round_trips_ms(
        self, source: str, target: str, count: int, timeout_s: float
    ) -> tuple[float, ...]:
        echoes = self._echoes(source)
        try:
            return tuple(echoes.round_trips_ms(self.host(target), count, timeout_s))
        finally:
            echoes.close()

    def probe(self, source: str, target: str, timeout_s: float) -> EchoProbe:
        return EchoThread(self._echoes(source), self.host(target), timeout_s)

    def _echoes(self, source: str) -> Echoes:
        _, (opened,) = self._switch.ask(OpenEcho(self._number, source))
        return Echoes(socket.socket(fileno=opened))

    def close(self) -> None:
        for descriptor in self._namespaces.values():
            os.close(descriptor)
        self._switch.ask(Close(self._number))


class NetworkChanges:
    """The backend that changes what goes between nodes. All of it vanishes with the network."""

    actions = frozenset(get_args(Change))

    def __init__(self, network: NamespaceNetwork) -> None:
        self._network = network

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Change)
        return self._network.impose(action)

    def release(self, node: str | None = None) -> None:
        """No change of a network keeps a process from ending."""

    def close(self) -> None:
        """The network itself is closed by its run."""
