"""Changes in the network of one run.

Each kind of change is made by the part of the kernel that supports it: drops by nftables, rates by
HTB, and delays by netem or queues.

-> ``core/traffic.py``: the changes. ``network/shaping.py`` and ``network/packet_queue.py``: rates
and delays. ``faults/network/``: the faults.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

from pyroute2 import IPRoute

from chaoskit.errors import HarnessError
from chaoskit.substrate.core import commands, namespaces
from chaoskit.substrate.core.namespaces import INSIDE
from chaoskit.substrate.core.traffic import (
    Block,
    Change,
    Degrade,
    Narrow,
    Unplug,
    Way,
    nft_packets,
    nft_table,
    profiles,
)
from chaoskit.substrate.network import shaping
from chaoskit.substrate.network.fabric import Fabric
from chaoskit.substrate.network.packet_queue import PacketQueues


class NetworkPart(Protocol):
    """Component that makes some kinds of changes.

    All methods raise HarnessError, OSError or NetlinkError if the kernel refuses. A count is 0
    where the kernel counts nothing.
    """

    def impose(self, number: int, change: Change) -> None:
        """Make a change, which has this number from then on."""

    def lift(self, number: int) -> None:
        """Undo a change."""

    def packets(self, number: int) -> int:
        """Return how many packets a change has affected so far."""

    def moved(self, station: str) -> None:
        """Make the present changes in the new namespace of a station that has moved."""

    def close(self) -> None:
        """Release what does not vanish with the network."""


class Wiring:
    """All changes in force of one fabric. Each has a number.

    All methods raise HarnessError, OSError or NetlinkError if the kernel refuses, and KeyError for
    a change that is not in force.
    """

    def __init__(self, fabric: Fabric) -> None:
        netem = kernel_has_netem()
        rules, link, shapes = _Rules(fabric), _Links(fabric), TrafficShaper(fabric)
        self._parts: dict[type[Change], NetworkPart] = {
            Block: rules,
            Unplug: link,
            Narrow: shapes,
            Degrade: shapes if netem else DelayQueues(fabric),
        }
        self._numbers = itertools.count(1)
        self._imposed: dict[int, NetworkPart] = {}

    def impose(self, change: Change) -> int:
        """Make a change and return its number."""
        number, part = next(self._numbers), self._parts[type(change)]
        part.impose(number, change)
        self._imposed[number] = part
        return number

    def packets(self, number: int) -> int:
        """Return how many packets a change has affected so far."""
        return self._imposed[number].packets(number)

    def lift(self, number: int) -> int:
        """Undo a change and return how many packets it has affected."""
        packets = self._imposed[number].packets(number)
        self._imposed.pop(number).lift(number)
        return packets

    def moved(self, station: str) -> None:
        """Apply the changes to a station that has moved to another namespace."""
        for part in set(self._parts.values()):
            part.moved(station)

    def close(self) -> None:
        """Release all components. The changes end with the network."""
        for part in set(self._parts.values()):
            part.close()


@functools.cache
def kernel_has_netem() -> bool:
    """Return whether the kernel can delay packets itself; the answer is kept for this process.

    It is tried in an unused namespace. Raises OSError if none can be created.
    """
    namespace = namespaces.create()
    try:
        with namespaces.entered(namespace), IPRoute() as links:
            return shaping.has_netem(links)
    finally:
        os.close(namespace)


class _Rules:
    """Blocks, by a table of nftables for each change."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Block)
        ports = {name: station.port for name, station in self._fabric.stations.items()}
        addresses = {name: station.address for name, station in self._fabric.stations.items()}
        self._nft("-f", "-", script=nft_table(_table(number), change, ports, addresses))

    def lift(self, number: int) -> None:
        self._nft("delete", "table", "netdev", _table(number))

    def packets(self, number: int) -> int:
        return nft_packets(self._nft("--json", "list", "table", "netdev", _table(number)))

    def moved(self, station: str) -> None:
        """Do nothing: all rules are at the bridge."""

    def close(self) -> None:
        """Do nothing."""

    def _nft(self, *arguments: str, script: str = "") -> bytes:
        """Run nft in the namespace of the bridge, and return its output."""
        return _run(self._fabric.namespace, ["nft", *arguments], script)


def _table(number: int) -> str:
    return f"change{number}"


class _Links:
    """Links that are taken down. Packets that a link would have carried are not counted."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._unplugged: dict[int, str] = {}

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Unplug)
        self._unplugged[number] = self._fabric.stations[change.station].port
        self._set(self._unplugged[number], "down")

    def lift(self, number: int) -> None:
        port = self._unplugged.pop(number)
        if port not in self._unplugged.values():
            self._set(port, "up")

    def packets(self, number: int) -> int:
        return 0

    def moved(self, station: str) -> None:
        """Do nothing: the links are at the bridge."""

    def close(self) -> None:
        """Do nothing."""

    def _set(self, port: str, state: str) -> None:
        """Set the link of a station ``up`` or ``down``."""
        with namespaces.entered(self._fabric.namespace), IPRoute() as links:
            (index,) = links.link_lookup(ifname=port)
            links.link("set", index=index, state=state)


class Meter(NamedTuple):
    """A count of packets that ``passed``, or ``waited`` for their rate.

    Attributes:
        counted: the packets that are counted.
        place: a way, or a station with all its traffic.
    """

    counted: Literal["passed", "waited"]
    place: Way | str


def _meters(change: Narrow | Degrade) -> list[Meter]:
    """Return the meters that show how many packets a change has affected."""
    if isinstance(change, Degrade):
        return [Meter("passed", way) for way in change.ways]
    return [
        *(Meter("waited", way) for way in change.ways),
        *(Meter("waited", station) for station in change.stations),
    ]


class TrafficShaper:
    """Rates by HTB and delays by netem where packets leave the bridge.

    Totals are also shaped at the station. Each change of a link loses the packets that wait there.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._changes: dict[int, Narrow | Degrade] = {}
        self._counts_before: dict[int, int] = {}  # change -> count of its meters when it was made
        self._classes: dict[Way, str] = {}
        self._former_counts: Counter[Meter] = Counter()  # counts of replaced classes
        with namespaces.entered(fabric.namespace):
            self._links = IPRoute()

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Narrow | Degrade)
        self._changes[number] = change
        self._counts_before[number] = self._count(change)
        self._shape(_affected_stations(change))

    def lift(self, number: int) -> None:
        self._shape(_affected_stations(self._changes.pop(number)))

    def packets(self, number: int) -> int:
        return self._count(self._changes[number]) - self._counts_before[number]

    def _count(self, change: Narrow | Degrade) -> int:
        """Return the count of a change's meters since the network was created."""
        return sum(self._former_counts[meter] + self._read(meter) for meter in _meters(change))

    def _read(self, meter: Meter) -> int:
        """Return what the kernel has counted since the current classes were created."""
        counted, place = meter
        if isinstance(place, str):
            return self._waited_at(place)
        passed, waited = shaping.packets(self._links, self._port(place[1])).get(
            self._classes.get(place, ""), (0, 0)
        )
        return waited if counted == "waited" else passed

    def _waited_at(self, name: str) -> int:
        """Return how often packets to or from the station waited."""
        with namespaces.entered(self._fabric.stations[name].namespace), IPRoute() as inside:
            outgoing = shaping.packets(inside, inside.link_lookup(ifname=INSIDE)[0])
        incoming = shaping.packets(self._links, self._port(name))
        return sum(waited for classes in (outgoing, incoming) for _, waited in classes.values())

    def moved(self, station: str) -> None:
        self._shape([station])

    def close(self) -> None:
        self._links.close()

    def _port(self, station: str) -> int:
        """Return the index of a station's link on the bridge."""
        (index,) = self._links.link_lookup(ifname=self._fabric.stations[station].port)
        return int(index)

    def _shape(self, stations: Collection[str]) -> None:
        """Shape the links of stations anew for all changes, and keep the counts of old classes."""
        for meter in set(self._former_counts).union(
            *(_meters(change) for change in self._changes.values())
        ):
            if (meter.place if isinstance(meter.place, str) else meter.place[1]) in stations:
                self._former_counts[meter] += self._read(meter)
        changes = self._changes.values()
        narrows = [change for change in changes if isinstance(change, Narrow)]
        delays = profiles(change for change in changes if isinstance(change, Degrade))
        for station in stations:
            total = min(
                [narrow.bits_per_s for narrow in narrows if station in narrow.stations],
                default=math.inf,
            )
            lanes = {}
            for other in self._fabric.stations.values():
                way = (other.name, station)
                rate = min(
                    [narrow.bits_per_s for narrow in narrows if way in narrow.ways],
                    default=math.inf,
                )
                if way in delays or rate < math.inf:
                    lanes[other.address] = shaping.Lane(rate, delays.get(way))
            names = shaping.shape(self._links, self._port(station), total, lanes)
            for other in self._fabric.stations.values():
                self._classes[other.name, station] = names.get(other.address, "")
            with namespaces.entered(self._fabric.stations[station].namespace), IPRoute() as inside:
                shaping.shape(inside, inside.link_lookup(ifname=INSIDE)[0], total, {})


def _affected_stations(change: Narrow | Degrade) -> set[str]:
    """Return the stations whose links must be shaped again."""
    targets = {target for _, target in change.ways}
    return targets | set(change.stations) if isinstance(change, Narrow) else targets


class DelayQueues:
    """Delays without netem, by queues at the receiving stations."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._changes: dict[int, Degrade] = {}
        self._counts_before: dict[int, int] = {}  # change -> count of its ways when it was made
        self._former_counts: Counter[Way] = Counter()  # counts of former namespaces of stations
        self._queues: dict[str, PacketQueues] = {}  # by receiving station
        self._queued: set[Way] = set()

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Degrade)
        self._changes[number] = change
        self._counts_before[number] = self._count(change)
        self._update_queues()

    def lift(self, number: int) -> None:
        del self._changes[number]
        self._update_queues()

    def packets(self, number: int) -> int:
        return self._count(self._changes[number]) - self._counts_before[number]

    def _count(self, change: Degrade) -> int:
        """Return how many packets of a change's ways were delayed since the network was created."""
        return sum(self._former_counts[way] + self._read(way) for way in change.ways)

    def _read(self, way: Way) -> int:
        """Return the count of a way since the present queues of its target were created."""
        source, target = way
        return (
            self._queues[target].delayed[self._queue_number(source)]
            if target in self._queues
            else 0
        )

    def moved(self, station: str) -> None:
        if station in self._queues:
            for other in self._fabric.stations:
                self._former_counts[other, station] += self._read((other, station))
            self._queues.pop(station).close()
            self._queued = {way for way in self._queued if way[1] != station}
            self._update_queues()

    def close(self) -> None:
        for queues in self._queues.values():
            queues.close()
        if self._fabric.has_lent_namespaces:  # rules in a lent namespace would stay
            for source, target in self._queued:
                self._rule("--delete", source, target)

    def _update_queues(self) -> None:
        """Delay each way according to all changes together."""
        by_way = profiles(self._changes.values())
        for source, target in self._queued - by_way.keys():
            self._rule("--delete", source, target)
            self._queues[target].unbind(self._queue_number(source))
        for (source, target), profile in by_way.items():
            if target not in self._queues:
                with namespaces.entered(self._fabric.stations[target].namespace):
                    self._queues[target] = PacketQueues()
            self._queues[target].bind(self._queue_number(source), profile)
            if (source, target) not in self._queued:
                self._rule("--append", source, target)
        self._queued = set(by_way)

    def _queue_number(self, source: str) -> int:
        """Return the number of the queues for packets of a source."""
        return 1 + list(self._fabric.stations).index(source)

    def _rule(self, verb: str, source: str, target: str) -> None:
        """Add or remove (``--append``, ``--delete``) the rule that queues packets of a way."""
        way = ["--in-interface", INSIDE, "--source", self._fabric.stations[source].address]
        verdict = [
            "--jump",
            "NFQUEUE",
            "--queue-num",
            str(self._queue_number(source)),
            "--queue-bypass",
        ]
        command = ["iptables", "--wait", "--table", "mangle", verb, "PREROUTING", *way, *verdict]
        _run(self._fabric.stations[target].namespace, command)


def _run(namespace: int, command: list[str], script: str = "") -> bytes:
    """Run a command in a namespace, and return its output.

    Raises HarnessError if it fails, and TimeoutExpired if it does not end within 10 s.
    """
    with namespaces.entered(namespace):
        try:
            result = commands.call(command, script)
        except FileNotFoundError:
            raise HarnessError(
                f"{command[0]} not found: install the package of that name"
            ) from None
    if result.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {result.stderr.decode().strip()}")
    return result.stdout
