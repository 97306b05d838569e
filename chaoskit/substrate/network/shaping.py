"""Rates, and delays by netem, on one link: a tree of HTB classes, one for each source station.

-> ``network/wiring.py``: which links are shaped for a change. ``network/packet_queue.py``: delays
without netem.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from chaoskit.substrate.core.traffic import Profile

_ROOT = 0x10000
_ALL, _REST = 0x10001, 0x10002
_FIRST = 0x10010  # first class of a source; its netem has the same number, one level up
#: Name of the class that all packets pass.
TOTAL = f"{_ALL:#x}"
_ETH_P_IP = 0x0800
_ENDLESS_BYTES_PER_S = 10**10
_OWN_BYTES_PER_S = 1000  # small, as a class's own rate does not count against the total
_BURST_BYTES = 2**17  # two of the largest packets that a virtual link carries in one piece
_TEST_LINK = "lo"


@dataclass(frozen=True, slots=True)
class Lane:
    """Shaping of the packets of one source.

    Attributes:
        bits_per_s: rate limit; math.inf for none.
        profile: delay and jitter; None for none.
    """

    bits_per_s: float = math.inf
    profile: Profile | None = None


def shape(
    links: IPRoute, link: int, total_bits_per_s: float, lanes: Mapping[str, Lane]
) -> dict[str, str]:
    """Shape the packets that leave by ``link`` (an index).

    Earlier shaping is replaced; packets that wait are lost. Raises NetlinkError if the kernel
    refuses.

    Args:
        total_bits_per_s: rate limit of all packets together; math.inf for none.
        lanes: IPv4 address of a source -> its lane. Other sources share only the total.

    Returns:
        Address -> name of the class that its packets pass.
    """
    clear(links, link)
    if not lanes and math.isinf(total_bits_per_s):
        return {}
    links.tc("add", "htb", link, _ROOT, default=_REST & 0xFFFF)
    _add_class(links, link, _ALL, _ROOT, total_bits_per_s)
    _add_class(links, link, _REST, _ALL, math.inf)
    for number, (address, lane) in enumerate(sorted(lanes.items())):
        name = _FIRST + number
        _add_class(links, link, name, _ALL, lane.bits_per_s)
        key = f"{int(ipaddress.IPv4Address(address)):#010x}/0xffffffff+12"
        links.tc(
            "add-filter",
            "u32",
            link,
            parent=_ROOT,
            prio=1,
            protocol=_ETH_P_IP,
            target=name,
            keys=[key],
        )
        if lane.profile is not None:
            _add_netem(links, link, (name & 0xFFFF) << 16, name, lane.profile)
    return {address: f"{_FIRST + number:#x}" for number, address in enumerate(sorted(lanes))}


def clear(links: IPRoute, link: int) -> None:
    """Remove all shaping from a link."""
    try:
        links.tc("del", "htb", link, _ROOT)
    except NetlinkError:
        return  # no shaping was in force


def packets(links: IPRoute, link: int) -> dict[str, tuple[int, int]]:
    """Return the counts of each class on a link, by the name of the class.

    Of each pair, the first is the number of packets that have passed, and the second how often a
    packet waited for its rate.
    """
    counts = {}
    for message in links.get_classes(link):
        stats = message.get_attr("TCA_STATS2")
        passed, waited = (
            stats.get_attr("TCA_STATS_BASIC")["packets"],
            stats.get_attr("TCA_STATS_QUEUE")["overlimits"],
        )
        counts[f"{message['handle']:#x}"] = (int(passed), int(waited))
    return counts


def has_netem(links: IPRoute) -> bool:
    """Return whether the kernel can delay packets itself. Call it in an unused namespace."""
    return _has_discipline(links, "netem", delay=1)


def has_htb(links: IPRoute) -> bool:
    """Return whether the kernel can limit rates. Call it in an unused namespace."""
    return _has_discipline(links, "htb", default=1)


def _has_discipline(links: IPRoute, kind: str, **options: int) -> bool:
    """Return whether a queueing discipline can be added to the loopback link; it is removed."""
    (link,) = links.link_lookup(ifname=_TEST_LINK)
    try:
        links.tc("add", kind, link, _ROOT, **options)
    except NetlinkError:
        return False
    links.tc("del", kind, link, _ROOT)
    return True


def _add_class(links: IPRoute, link: int, name: int, parent: int, bits_per_s: float) -> None:
    """Add a class of HTB below another one, with a rate limit or math.inf for none."""
    bytes_per_s = _ENDLESS_BYTES_PER_S if math.isinf(bits_per_s) else max(1, round(bits_per_s / 8))
    own = bytes_per_s if parent == _ROOT else min(bytes_per_s, _OWN_BYTES_PER_S)
    buckets = {"burst": _BURST_BYTES, "cburst": _BURST_BYTES, "quantum": _BURST_BYTES // 2}
    links.tc("add-class", "htb", link, name, parent=parent, rate=own, ceil=bytes_per_s, **buckets)


def _add_netem(links: IPRoute, link: int, name: int, parent: int, profile: Profile) -> None:
    links.tc(
        "add",
        "netem",
        link,
        name,
        parent=parent,
        delay=round(profile.delay_ms * 1000),
        jitter=round(profile.jitter_ms * 1000),
        limit=65536,
    )


def main() -> None:
    """Print the disciplines that the kernel has, in one line: the entry point.

    Run this module in an unused namespace, as :mod:`chaoskit.substrate.limits.capabilities` does.
    """
    with IPRoute() as links:
        has = {"htb": has_htb(links), "netem": has_netem(links)}
    print(*(kind for kind in has if has[kind]))


if __name__ == "__main__":
    main()
