"""What is changed in the network of one run: each kind of change by the part of the kernel that can do it."""

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


class Part(Protocol):
    """Does some kinds of changes. All raise HarnessError if the kernel refuses."""

    def impose(self, number: int, change: Change) -> None: ...

    def lift(self, number: int) -> None: ...

    def packets(self, number: int) -> int:
        """How many packets a change has met so far."""

    def moved(self, station: str) -> None:
        """Do anew what was done in the namespace that the station had before."""

    def close(self) -> None:
        """Let go of what does not vanish with the network."""


class Wiring:
    """Every change of one fabric; each has a number."""

    def __init__(self, fabric: Fabric) -> None:
        netem = kernel_has_netem()
        rules, link, shapes = _Rules(fabric), _Links(fabric), TrafficShaper(fabric)
        self._parts: dict[type[Change], Part] = {
            Block: rules,
            Unplug: link,
            Narrow: shapes,
            Degrade: shapes if netem else DelayQueues(fabric),
        }
        self._numbers = itertools.count(1)
        self._of: dict[int, Part] = {}

    def impose(self, change: Change) -> int:
        """Do it. Gives the number of the change."""
        number, part = next(self._numbers), self._parts[type(change)]
        part.impose(number, change)
        self._of[number] = part
        return number

    def packets(self, number: int) -> int:
        """How many packets the change has met so far."""
        return self._of[number].packets(number)

    def lift(self, number: int) -> int:
        """Undo it. Gives how many packets it has met."""
        packets = self._of[number].packets(number)
        self._of.pop(number).lift(number)
        return packets

    def moved(self, station: str) -> None:
        """Have the changes hold for a station that has another namespace now."""
        for part in set(self._parts.values()):
            part.moved(station)

    def close(self) -> None:
        """All changes end with the network; so does what watches over them."""
        for part in set(self._parts.values()):
            part.close()


@functools.cache
def kernel_has_netem() -> bool:
    """Whether delays need no daemon of ours. Tried in an unused namespace."""
    namespace = namespaces.create()
    try:
        with namespaces.entered(namespace), IPRoute() as links:
            return shaping.has_netem(links)
    finally:
        os.close(namespace)


class _Rules:
    """A table of nftables for each change."""

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
        """Nothing to do: all is done at the bridge."""

    def close(self) -> None:
        """Nothing to do."""

    def _nft(self, *arguments: str, script: str = "") -> bytes:
        return _run(self._fabric.namespace, ["nft", *arguments], script)


def _table(number: int) -> str:
    return f"change{number}"


class _Links:
    """Takes links down. Nothing counts what a link would have carried."""

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
        """Nothing to do: all is done at the bridge."""

    def close(self) -> None:
        """Nothing to do."""

    def _set(self, port: str, state: str) -> None:
        with namespaces.entered(self._fabric.namespace), IPRoute() as links:
            (index,) = links.link_lookup(ifname=port)
            links.link("set", index=index, state=state)


class Meter(NamedTuple):
    """Packets of a way, or of all that a station sends and is sent, which ``passed``, or ``waited`` for their rate."""

    what: Literal["passed", "waited"]
    place: Way | str


def _meters(change: Narrow | Degrade) -> list[Meter]:
    """What shows that packets have met a change."""
    if isinstance(change, Degrade):
        return [Meter("passed", way) for way in change.ways]
    return [
        *(Meter("waited", way) for way in change.ways),
        *(Meter("waited", one) for one in change.stations),
    ]


class TrafficShaper:
    """Rates by HTB and delays by netem, where packets leave the bridge; totals also where they leave a station."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._changes: dict[int, Narrow | Degrade] = {}
        self._since: dict[int, int] = {}  # by change: what its ways and stations had met before
        self._classes: dict[Way, str] = {}
        self._earlier: Counter[Meter] = (
            Counter()
        )  # what the kernel had counted when classes were made anew
        with namespaces.entered(fabric.namespace):
            self._links = IPRoute()

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Narrow | Degrade)
        self._changes[number] = change
        self._since[number] = self._met(change)
        self._shape(_concerned(change))

    def lift(self, number: int) -> None:
        self._shape(_concerned(self._changes.pop(number)))

    def packets(self, number: int) -> int:
        return self._met(self._changes[number]) - self._since[number]

    def _met(self, change: Narrow | Degrade) -> int:
        """What the ways and stations of a change have met since the network was made."""
        return sum(self._earlier[meter] + self._read(meter) for meter in _meters(change))

    def _read(self, meter: Meter) -> int:
        """What the kernel has counted since the classes were made that it counts by."""
        what, place = meter
        if isinstance(place, str):
            return self._waited_at(place)
        passed, waited = shaping.packets(self._links, self._port(place[1])).get(
            self._classes.get(place, ""), (0, 0)
        )
        return waited if what == "waited" else passed

    def _waited_at(self, name: str) -> int:
        """Of what went to the station in all, and of what came from it."""
        with namespaces.entered(self._fabric.stations[name].namespace), IPRoute() as inside:
            out = shaping.packets(inside, inside.link_lookup(ifname=INSIDE)[0])
        into = shaping.packets(self._links, self._port(name))
        return sum(waited for classes in (out, into) for _, waited in classes.values())

    def moved(self, station: str) -> None:
        self._shape([station])

    def close(self) -> None:
        self._links.close()

    def _port(self, station: str) -> int:
        (index,) = self._links.link_lookup(ifname=self._fabric.stations[station].port)
        return int(index)

    def _shape(self, stations: Collection[str]) -> None:
        for meter in set(self._earlier).union(
            *(_meters(change) for change in self._changes.values())
        ):
            if (meter.place if isinstance(meter.place, str) else meter.place[1]) in stations:
                self._earlier[meter] += self._read(meter)
        changes = self._changes.values()
        narrows = [change for change in changes if isinstance(change, Narrow)]
        delays = profiles(change for change in changes if isinstance(change, Degrade))
        for station in stations:
            total = min(
                [one.bits_per_s for one in narrows if station in one.stations], default=math.inf
            )
            lanes = {}
            for other in self._fabric.stations.values():
                way = (other.name, station)
                rate = min([one.bits_per_s for one in narrows if way in one.ways], default=math.inf)
                if way in delays or rate < math.inf:
                    lanes[other.address] = shaping.Lane(rate, delays.get(way))
            names = shaping.shape(self._links, self._port(station), total, lanes)
            for other in self._fabric.stations.values():
                self._classes[other.name, station] = names.get(other.address, "")
            with namespaces.entered(self._fabric.stations[station].namespace), IPRoute() as inside:
                shaping.shape(inside, inside.link_lookup(ifname=INSIDE)[0], total, {})


def _concerned(change: Narrow | Degrade) -> set[str]:
    """Stations with links that are to be shaped anew."""
    targets = {target for _, target in change.ways}
    return targets | set(change.stations) if isinstance(change, Narrow) else targets


class DelayQueues:
    """Delays where there is no netem: queues at the stations that receive."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._changes: dict[int, Degrade] = {}
        self._since: dict[int, int] = {}  # by change: what its ways had met before
        self._earlier: Counter[Way] = (
            Counter()
        )  # what was counted in a namespace that a station had before
        self._queues: dict[str, PacketQueues] = {}  # by the station that receives
        self._queued: set[Way] = set()

    def impose(self, number: int, change: Change) -> None:
        assert isinstance(change, Degrade)
        self._changes[number] = change
        self._since[number] = self._met(change)
        self._requeue()

    def lift(self, number: int) -> None:
        del self._changes[number]
        self._requeue()

    def packets(self, number: int) -> int:
        return self._met(self._changes[number]) - self._since[number]

    def _met(self, change: Degrade) -> int:
        """What the ways of a change have met since the network was made."""
        return sum(self._earlier[way] + self._read(way) for way in change.ways)

    def _read(self, way: Way) -> int:
        source, target = way
        return self._queues[target].held[self._number(source)] if target in self._queues else 0

    def moved(self, station: str) -> None:
        if station in self._queues:
            for other in self._fabric.stations:
                self._earlier[other, station] += self._read((other, station))
            self._queues.pop(station).close()
            self._queued = {way for way in self._queued if way[1] != station}
            self._requeue()

    def close(self) -> None:
        for queues in self._queues.values():
            queues.close()
        if self._fabric.lent:  # the rules would stay
            for source, target in self._queued:
                self._rule("--delete", source, target)

    def _requeue(self) -> None:
        """Have each way held up as all changes together want it."""
        wanted = profiles(self._changes.values())
        for source, target in self._queued - wanted.keys():
            self._rule("--delete", source, target)
            self._queues[target].unbind(self._number(source))
        for (source, target), profile in wanted.items():
            if target not in self._queues:
                with namespaces.entered(self._fabric.stations[target].namespace):
                    self._queues[target] = PacketQueues()
            self._queues[target].bind(self._number(source), profile)
            if (source, target) not in self._queued:
                self._rule("--append", source, target)
        self._queued = set(wanted)

    def _number(self, source: str) -> int:
        return 1 + list(self._fabric.stations).index(source)

    def _rule(self, verb: str, source: str, target: str) -> None:
        way = ["--in-interface", INSIDE, "--source", self._fabric.stations[source].address]
        verdict = ["--jump", "NFQUEUE", "--queue-num", str(self._number(source)), "--queue-bypass"]
        command = ["iptables", "--wait", "--table", "mangle", verb, "PREROUTING", *way, *verdict]
        _run(self._fabric.stations[target].namespace, command)


def _run(namespace: int, command: list[str], script: str = "") -> bytes:
    with namespaces.entered(namespace):
        try:
            done = commands.call(command, script)
        except FileNotFoundError:
            raise HarnessError(
                f"{command[0]} not found: install the package of that name"
            ) from None
    if done.returncode != 0:
        raise HarnessError(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    return done.stdout
