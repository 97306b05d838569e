"""Substrate ``netns``: every node and the coordinator have networks of their own, in namespaces.

-> ``network/fabric.py``: namespaces, links and the bridge. ``network/wiring.py``: how traffic is
dropped, delayed or limited. ``netns/switch_process.py``: the process that has the right to do so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import get_args

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR, Network
from chaoskit.substrate.cluster.nodes import BaseCluster
from chaoskit.substrate.cluster.supervised import SupervisedSubstrate
from chaoskit.substrate.core.actions import Action, Applied, Backend, CountedAction
from chaoskit.substrate.core.echo import Echoes, EchoProbe, EchoThread
from chaoskit.substrate.core.namespaces import INSIDE
from chaoskit.substrate.core.traffic import Block, Change, Unplug, between
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.local import LocalSupervisor, enter_mounts, host_backends
from chaoskit.substrate.netns.switch import (
    Build,
    Close,
    Connect,
    Count,
    Impose,
    Lift,
    Listen,
    Move,
    OpenEcho,
    Switch,
    SwitchDone,
)
from chaoskit.substrate.supervisor.client import SupervisorLink


class NetnsSubstrate(SupervisedSubstrate):
    """A substrate with a warm supervisor on this host, and a switch process beside it."""

    name = "netns"

    def __init__(self) -> None:
        super().__init__()
        self._privileged = capabilities.privileged()
        self._supervisor = LocalSupervisor(self.undo)
        self._switch: Switch | None = None

    def warm_up(self) -> None:
        """Start the switch and the supervisor, unless they run.

        Raises HarnessError if one does not start.
        """
        if self._switch is None or self._switch.process.poll() is not None:
            self._switch = Switch(self.undo, privileged=self._privileged)
        self._supervisor.start(self._prefix())

    def link(self, station: str) -> SupervisorLink:
        return self._supervisor.link

    def why_not(self, action: type[Action]) -> str:
        """Return the reason why nodes of this substrate do not support an action; "" if they do."""
        return capabilities.why_not(action)

    def _prefix(self) -> list[str]:
        """Return the command that enters the user namespace of the networks; empty for root."""
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

    def backends(self, cluster: BaseCluster) -> Iterable[Backend]:
        return host_backends(self, cluster, self._enter_mounts)

    def _enter_mounts(self, pid: int) -> list[str]:
        """Return the command that runs another one in the mount namespace of process ``pid``."""
        return enter_mounts(pid, self._prefix() or ["nsenter"])

    def close(self) -> None:
        """End the supervisor, the switch, and everything that they started."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        self._supervisor.close()
        super().close()


class NamespaceNetwork:
    """The network of a run, as the launcher sees it.

    The launcher's connection begins at the coordinator's station, so no change of the traffic
    affects it.

    Args:
        lent: descriptors of existing namespaces, the first for the coordinator and one for each
            node; they are closed here. Empty to make new namespaces.

    Raises:
        HarnessError: if the network cannot be made, or the port is in use.
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

    def lend(
        self, request: Build | Move, namespaces: Sequence[int]
    ) -> tuple[SwitchDone, list[int]]:
        """Send the switch a request that needs these namespaces, and close them here.

        Return its answer and the descriptors that came with it, which the caller must close. Raises
        HarnessError if the switch refuses.
        """
        try:
            return self._switch.ask(request, *namespaces)
        finally:
            for namespace in namespaces:
                os.close(namespace)

    def _listen(self, port: int) -> socket.socket:
        """Return a listening socket at the coordinator's station.

        Raises HarnessError if the port is in use; 0 stands for a free one.
        """
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
        if capabilities.rules():
            return self.impose(Unplug(station=name))
        return self.impose(
            Block(ways=between([name], [other for other in self._hosts if other != name]))
        )

    def backends(self) -> Sequence[Backend]:
        return (NetworkChanges(self),)

    def impose(self, change: Change) -> CountedAction:
        """Change the traffic as an action of :mod:`chaoskit.substrate.core.traffic` describes.

        Return the handle that counts the affected packets and lifts the change.

        Raises:
            HarnessError: if the switch cannot make the change.
        """
        number = self._switch.ask(Impose(self._number, change))[0].number
        return CountedAction(
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
        """Return a sender of echoes from a station.

        Raises HarnessError if no socket can be opened there.
        """
        _, (descriptor,) = self._switch.ask(OpenEcho(self._number, source))
        return Echoes(socket.socket(fileno=descriptor))

    def close(self) -> None:
        for descriptor in self._namespaces.values():
            os.close(descriptor)
        self._switch.ask(Close(self._number))


class NetworkChanges:
    """Backend of changes to the traffic between nodes. All changes vanish with the network."""

    actions = frozenset(get_args(Change))

    def __init__(self, network: NamespaceNetwork) -> None:
        self._network = network

    def apply(self, node: str, action: Action) -> Applied:
        assert isinstance(action, Change)
        return self._network.impose(action)

    def release(self, node: str | None = None) -> None:
        """Do nothing: no change of a network keeps a process from ending."""

    def close(self) -> None:
        """Do nothing: the run closes the network itself."""
