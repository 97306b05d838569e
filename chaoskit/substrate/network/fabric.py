"""The network of one run: a namespace for each node, a veth pair from it to a bridge, and the bridge in one of its own.

The bridge must not lie in the namespace of the host: a Docker daemon there makes the kernel drop what it forwards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyroute2 import IPRoute

from chaoskit.errors import HarnessError
from chaoskit.substrate.core import namespaces
from chaoskit.substrate.core.namespaces import INSIDE

STATIONS_MAX = 250
_BRIDGE = "bridge"
_LOOPBACK_INDEX = 1


@dataclass(frozen=True, slots=True)
class Station:
    """One node's place in the network.

    Attributes:
        namespace: descriptor. address: IPv4, inside of it. port: its link on the bridge.
    """

    name: str
    namespace: int
    address: str
    port: str


class Fabric:
    """Made whole, or not at all; gone with its descriptors, and the processes that are in its namespaces.

    Args:
        lent: a namespace for each station, as descriptors that are taken over; it stays when the network goes. Without
            these each station gets a new one.

    Raises:
        OSError: if the kernel refuses. HarnessError: if there are more stations than addresses.
    """

    def __init__(self, names: Sequence[str], lent: Sequence[int] = ()) -> None:
        if len(names) > STATIONS_MAX:
            raise HarnessError(f"{len(names)} stations; a network has room for {STATIONS_MAX}")
        self.stations: dict[str, Station] = {}
        self.lent = bool(lent)
        self.namespace = namespaces.create()
        try:
            with namespaces.entered(self.namespace), IPRoute() as links:
                bridge = self._add_bridge(links)
                for number, name in enumerate(names, 1):
                    namespace = lent[number - 1] if lent else namespaces.create()
                    self._add_station(
                        links,
                        bridge,
                        Station(name, namespace, f"10.77.0.{number}", f"port{number}"),
                    )
        except BaseException:
            self.close()
            raise

    def _add_bridge(self, links: IPRoute) -> int:
        links.link("set", index=_LOOPBACK_INDEX, state="up")
        links.link("add", ifname=_BRIDGE, kind="bridge")
        (bridge,) = links.link_lookup(ifname=_BRIDGE)
        links.link("set", index=bridge, state="up")
        return int(bridge)

    def _add_station(self, links: IPRoute, bridge: int, station: Station) -> None:
        self.stations[station.name] = station  # from now on it is closed with the others
        links.link(
            "add",
            ifname=station.port,
            kind="veth",
            peer={"ifname": INSIDE, "net_ns_fd": station.namespace},
        )
        (port,) = links.link_lookup(ifname=station.port)
        links.link("set", index=port, master=bridge, state="up")
        _bring_up(station)

    def move(self, name: str, namespace: int) -> None:
        """Give a station another namespace, and take over its descriptor: the link goes there. Raises OSError."""
        old = self.stations[name]
        self.stations[name] = station = replace(old, namespace=namespace)
        with namespaces.entered(old.namespace), IPRoute() as inside:
            (ethernet,) = inside.link_lookup(ifname=INSIDE)
            inside.link("set", index=ethernet, net_ns_fd=namespace)
        os.close(old.namespace)
        _bring_up(station)

    def close(self) -> None:
        """Let go of the namespaces. Those that were lent are as they were before."""
        if self.lent and self.namespace >= 0:
            with namespaces.entered(self.namespace), IPRoute() as links:
                for station in self.stations.values():
                    for port in links.link_lookup(ifname=station.port):
                        links.link("del", index=port)  # and its other end
        for station in self.stations.values():
            os.close(station.namespace)
        self.stations.clear()
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1


def _bring_up(station: Station) -> None:
    """The station's end of its link."""
    with namespaces.entered(station.namespace), IPRoute() as inside:
        (ethernet,) = inside.link_lookup(ifname=INSIDE)
        inside.addr("add", index=ethernet, address=station.address, prefixlen=24)
        inside.link("set", index=_LOOPBACK_INDEX, state="up")
        inside.link("set", index=ethernet, state="up")
