"""What a fault may do to the traffic of a run, and what that means for each way from one station to another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import msgspec

from chaoskit.substrate.core.actions import Action

#: The kernel draws shares as so many of this number.
SHARE_OF = 1_000_000
#: From a station to another one.
Way = tuple[str, str]


class Block(Action, frozen=True, kw_only=True):
    """Lose everything that goes these ways, in silence; or, if ``loud``, answer TCP segments with a reset.

    Attributes:
        port: only TCP from or to this port; 0 for everything.
        share: of the packets, drawn for each by the kernel; 1 for all of them.
    """

    ways: tuple[Way, ...]
    loud: bool = False
    port: int = 0
    share: float = 1.0


class Degrade(Action, frozen=True, kw_only=True):
    """Hold up packets.

    Attributes:
        delay_ms: what is added to each packet's way. jitter_ms: drawn evenly for each, up to so much more or less.
    """

    ways: tuple[Way, ...]
    delay_ms: float = 0.0
    jitter_ms: float = 0.0


class Unplug(Action, frozen=True, kw_only=True):
    """Take the station's link down; it sees that it has no carrier."""

    station: str


class Narrow(Action, frozen=True, kw_only=True):
    """Let so many bits a second pass: on these ways each; or from these stations in all, and to them in all."""

    bits_per_s: float
    ways: tuple[Way, ...] = ()
    stations: tuple[str, ...] = ()


Change = Block | Degrade | Unplug | Narrow


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How packets of one way are held up. Fields as in :class:`Degrade`."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def __add__(self, other: Profile) -> Profile:
        """Both, one after the other."""
        return Profile(
            delay_ms=self.delay_ms + other.delay_ms,
            jitter_ms=self.jitter_ms + other.jitter_ms,
        )


def profiles(changes: Iterable[Degrade]) -> dict[Way, Profile]:
    """What all these do together to each way that any of them names."""
    found: dict[Way, list[Profile]] = {}
    for change in changes:
        profile = Profile(delay_ms=change.delay_ms, jitter_ms=change.jitter_ms)
        for way in change.ways:
            found.setdefault(way, []).append(profile)
    return {way: reduce(Profile.__add__, several) for way, several in found.items()}


def between(one: Sequence[str], other: Sequence[str]) -> tuple[Way, ...]:
    """Both ways between each of the first and each of the others."""
    there = towards(one, other)
    return (*there, *((target, source) for source, target in there))


def towards(sources: Sequence[str], targets: Sequence[str]) -> tuple[Way, ...]:
    """The ways from each of the first to each of the others."""
    return tuple((source, target) for source in sources for target in targets if source != target)


# -- nftables: rules where a packet comes from a station onto the bridge -------------------------------------------


def nft_table(
    name: str, change: Block, ports: Mapping[str, str], addresses: Mapping[str, str]
) -> str:
    """A script that adds table ``name`` (family netdev), with a counter in each rule.

    Args:
        ports: by station, its link on the bridge. addresses: by station, its IPv4 address.
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
    """Rules for packets that ``match``, each with a counter. What they do to them: see :class:`Block`."""
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
    """Packets that the counters of a table have seen, from ``nft --json list table``."""
    entries = msgspec.json.decode(listing)["nftables"]
    parts = [part for entry in entries if "rule" in entry for part in entry["rule"]["expr"]]
    return sum(part["counter"]["packets"] for part in parts if "counter" in part)
