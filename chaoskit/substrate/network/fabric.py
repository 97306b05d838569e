"""The network of one run: a namespace and a veth pair for each node, and a bridge.

The bridge has a namespace of its own. It must not lie in that of the host: a Docker daemon there
makes the kernel drop forwarded packets.

-> ``network/wiring.py``: how traffic on it is changed. ``netns/switch_process.py``: the process
that keeps it.
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
    """The place of a node or the coordinator in the network.

    Attributes:
        namespace: descriptor of the network namespace.
        address: IPv4 address inside the namespace.
        port: name of the link on the bridge that leads to it.
    """

    name: str
    namespace: int
    address: str
    port: str


class Fabric:
    """Network of a run.

    It is created as a whole, and vanishes with its descriptors and the processes inside.

    Args:
        lent_namespaces: descriptors of an existing namespace for each station. They are closed
            later, and the namespaces stay. Without these each station gets a new namespace.

    Attributes:
        stations: the stations by name.
        has_lent_namespaces: True if the namespaces of the stations are lent.
        namespace: descriptor of the bridge's namespace; -1 once closed.

    Raises:
        OSError, NetlinkError: if the kernel refuses.
        HarnessError: if there are more stations than addresses.
    """

    def __init__(self, names: Sequence[str], lent_namespaces: Sequence[int] = ()) -> None:
        if len(names) > STATIONS_MAX:
            raise HarnessError(
                f"a network has room for {STATIONS_MAX} stations, not for {len(names)}"
            )
        self.stations: dict[str, Station] = {}
        self.has_lent_namespaces = bool(lent_namespaces)
        self.namespace = namespaces.create()
        try:
            with namespaces.entered(self.namespace), IPRoute() as links:
                bridge = self._add_bridge(links)
                for number, name in enumerate(names, 1):
                    namespace = (
                        lent_namespaces[number - 1] if lent_namespaces else namespaces.create()
                    )
                    self._add_station(
                        links,
                        bridge,
                        Station(name, namespace, f"10.77.0.{number}", f"port{number}"),
                    )
        except BaseException:
            self.close()
            raise

    def _add_bridge(self, links: IPRoute) -> int:
        """Create the bridge, and return its index."""
        links.link("set", index=_LOOPBACK_INDEX, state="up")
        links.link("add", ifname=_BRIDGE, kind="bridge")
        (bridge,) = links.link_lookup(ifname=_BRIDGE)
        links.link("set", index=bridge, state="up")
        return int(bridge)

    def _add_station(self, links: IPRoute, bridge: int, station: Station) -> None:
        """Connect a station to the bridge by a pair of links, and configure its end."""
        self.stations[station.name] = station  # registered first, so that close() includes it
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
        """Move a station's link to another namespace. The given descriptor is closed later.

        Its address and its link on the bridge stay the same. Raises OSError or NetlinkError if the
        kernel refuses.
        """
        old = self.stations[name]
        self.stations[name] = station = replace(old, namespace=namespace)
        with namespaces.entered(old.namespace), IPRoute() as inside:
            (ethernet,) = inside.link_lookup(ifname=INSIDE)
            inside.link("set", index=ethernet, net_ns_fd=namespace)
        os.close(old.namespace)
        _bring_up(station)

    def close(self) -> None:
        """Close the descriptors of the namespaces. Links in lent namespaces are removed first."""
        if self.has_lent_namespaces and self.namespace >= 0:
            with namespaces.entered(self.namespace), IPRoute() as links:
                for station in self.stations.values():
                    for port in links.link_lookup(ifname=station.port):
                        links.link("del", index=port)  # removes the other end, too
        for station in self.stations.values():
            os.close(station.namespace)
        self.stations.clear()
        if self.namespace >= 0:
            os.close(self.namespace)
            self.namespace = -1


def _bring_up(station: Station) -> None:
    """Configure the station's end of its link."""
    with namespaces.entered(station.namespace), IPRoute() as inside:
        (ethernet,) = inside.link_lookup(ifname=INSIDE)
        inside.addr("add", index=ethernet, address=station.address, prefixlen=24)
        inside.link("set", index=_LOOPBACK_INDEX, state="up")
        inside.link("set", index=ethernet, state="up")
