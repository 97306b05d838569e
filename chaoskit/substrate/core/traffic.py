"""Changes that a fault makes to the traffic between stations, and the rules that carry them out.

A station is a node or the coordinator, as the network of a run sees it. Pure.

-> ``network/wiring.py`` makes the changes in a network of this machine, and
``kubernetes/pods/network.py`` in pods. ``faults/network/``: the faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import msgspec

from chaoskit.substrate.core.actions import Action

#: Shares of packets are drawn as a random number below this.
SHARE_OF = 1_000_000
#: One direction of traffic: (source station, target station).
Way = tuple[str, str]


class Block(Action, frozen=True, kw_only=True):
    """Drop packets of these ways silently; if ``loud``, answer TCP segments with a reset instead.

    Packets of other protocols pass if ``loud`` or ``port`` is given.

    Attributes:
        port: only TCP packets from or to this port; 0 for all packets.
        share: probability that a packet is dropped, drawn for each by the kernel; 1 for all.
    """

    ways: tuple[Way, ...]
    loud: bool = False
    port: int = 0
    share: float = 1.0


class Degrade(Action, frozen=True, kw_only=True):
    """Delay packets.

    Attributes:
        delay_ms: delay that is added to each packet.
        jitter_ms: the delay of each packet varies evenly by up to this much in both directions.
    """

    ways: tuple[Way, ...]
    delay_ms: float = 0.0
    jitter_ms: float = 0.0


class Unplug(Action, frozen=True, kw_only=True):
    """Take the link of a station down. The station sees that it has no carrier."""

    station: str


class Narrow(Action, frozen=True, kw_only=True):
    """Limit the throughput to ``bits_per_s``.

    Attributes:
        ways: each of these ways has a limit of its own.
        stations: all traffic from these stations shares a limit, and all traffic to them another.
    """

    bits_per_s: float
    ways: tuple[Way, ...] = ()
    stations: tuple[str, ...] = ()


Change = Block | Degrade | Unplug | Narrow


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Delay of packets of one way. The fields are those of :class:`Degrade`."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def __add__(self, other: Profile) -> Profile:
        """Return the profile of both delays in sequence: the sums of the fields."""
        return Profile(
            delay_ms=self.delay_ms + other.delay_ms,
            jitter_ms=self.jitter_ms + other.jitter_ms,
        )


def profiles(changes: Iterable[Degrade]) -> dict[Way, Profile]:
    """Return, for each way that is named in ``changes``, the profile of all changes together."""
    by_way: dict[Way, list[Profile]] = {}
    for change in changes:
        profile = Profile(delay_ms=change.delay_ms, jitter_ms=change.jitter_ms)
        for way in change.ways:
            by_way.setdefault(way, []).append(profile)
    return {way: reduce(Profile.__add__, parts) for way, parts in by_way.items()}


def between(stations: Sequence[str], others: Sequence[str]) -> tuple[Way, ...]:
    """Return both ways between each station of the first group and each of the second."""
    outward = towards(stations, others)
    return (*outward, *((target, source) for source, target in outward))


def towards(sources: Sequence[str], targets: Sequence[str]) -> tuple[Way, ...]:
    """Return the ways from each source to each target, except from a station to itself."""
    return tuple((source, target) for source in sources for target in targets if source != target)


# -- nftables: rules where a packet comes from a station onto the bridge ---------------------------


def nft_table(
    name: str, change: Block, ports: Mapping[str, str], addresses: Mapping[str, str]
) -> str:
    """Return a script for ``nft -f`` that adds table ``name`` (family netdev).

    Its rules drop or refuse the packets of ``change``, and each rule has a counter.

    Args:
        ports: station -> its link on the bridge.
        addresses: station -> its IPv4 address.
    """
    lines = []
    for source in dict.fromkeys(source for source, _ in change.ways):
        hook = f'type filter hook ingress device "{ports[source]}" priority 0'
        targets = [target for other, target in change.ways if other == source]
        matches = [f"ip daddr {addresses[target]}" for target in targets]
        rules = [
            rule
            for match in matches
            for rule in verdicts(match, loud=change.loud, port=change.port, share=change.share)
        ]
        lines += [f"chain {ports[source]} {{", hook, *rules, "}"]
    return "\n".join([f"table netdev {name} {{", *lines, "}", ""])


def verdicts(match: str, *, loud: bool, port: int, share: float) -> list[str]:
    """Return nftables rules for packets that ``match``, each with a counter.

    Args:
        match: nftables expression that selects the packets.
        loud: as in :class:`Block`, like ``port`` and ``share``.
    """
    chance = f" numgen random mod {SHARE_OF} < {round(share * SHARE_OF)}" if share < 1 else ""
    if port:
        sides = [f"{match} tcp {side} {port}" for side in ("dport", "sport")]
    elif loud:
        sides = [f"{match} meta l4proto tcp"]
    else:
        sides = [match]
    verdict = "reject with tcp reset" if loud else "drop"
    return [f"{side}{chance} counter {verdict}" for side in sides]


def nft_packets(listing: bytes) -> int:
    """Return the number of packets that all rules of a table have counted together.

    Args:
        listing: output of ``nft --json list table``.
    """
    objects = msgspec.json.decode(listing)["nftables"]
    parts = [
        part
        for rule_object in objects
        if "rule" in rule_object
        for part in rule_object["rule"]["expr"]
    ]
    return sum(part["counter"]["packets"] for part in parts if "counter" in part)
