"""Rules for packets: a table of nftables for each effect, whose addresses time out in the kernel.

Rules of a hand that has died match no packet once the time of their addresses is over. The table
without addresses that is left is harmless, and ``hand/network/liveness.py`` finds it by its name.

-> ``hand/network/traffic.py`` makes effects of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..fields import Network
from .tools import run_tool

#: Elements of sets, by the name of the set.
Elements = Mapping[str, Sequence[str]]
_ADDRESS_SETS = {"v4": "type ipv4_addr; flags interval, timeout;"}
_ADDRESS_SETS["v6"] = "type ipv6_addr; flags interval, timeout;"
#: Name, type and hook of the chain of a direction. A chain of the type route finds the route of a
#: packet anew if a rule has changed its address.
_CHAINS = {"in": ("incoming", "filter", "input"), "out": ("outgoing", "route", "output")}
#: Mark of outgoing packets that are dropped on the loopback interface.
_DROPPED_MARK = "0x0c4a05"
_LOOPBACK = {"v4": "ip daddr set 127.0.0.1", "v6": "ip6 daddr set ::1"}
_ANSWER = "tcp flags & rst != rst counter reject with tcp reset"  # a reset itself must pass
_RANDOM_STEPS = 1_000_000
_COUNTER = re.compile(r'counter packets (\d+) bytes \d+.* comment "(in|out)_(\w+)"')
_ELEMENTS = "elements = {"


def address_elements(networks: Sequence[Network]) -> dict[str, list[str]]:
    """Return the elements of the sets of addresses, without the family that has none."""
    elements: dict[str, list[str]] = {}
    for network in networks:
        elements.setdefault(f"v{network.version}", []).append(str(network))
    return elements


def dropping_table(
    table: str, elements: Elements, directions: Sequence[str], share: float, lasts_s: float
) -> str:
    """Return a script that drops a share of the packets from and to some addresses.

    Packets that stay on the loopback interface are left alone. Outgoing packets are sent to it
    and dropped there: TCP does not count a segment as sent if a rule drops it before.
    """
    chance = "" if share >= 1 else f"numgen random mod {_RANDOM_STEPS} < {_chance(share)} "
    rules: dict[str, list[str]] = {direction: [] for direction in directions}
    for direction in directions:
        for name in elements:
            match = _address_match(name, direction)
            drop = (
                "drop" if direction == "in" else f"meta mark set {_DROPPED_MARK} {_LOOPBACK[name]}"
            )
            rules[direction] += [
                f'{match} counter comment "{direction}_seen"',
                f'{match} {chance}counter {drop} comment "{direction}_dropped"',
            ]
    if "out" in rules:
        rules.setdefault("in", []).append(f'iifname "lo" meta mark {_DROPPED_MARK} drop')
    sets = {name: _ADDRESS_SETS[name] for name in elements}
    return _table(table, sets, rules) + add_elements(table, elements, lasts_s)


def refusing_table(
    table: str, elements: Elements, directions: Sequence[str], lasts_s: float
) -> str:
    """Return a script that answers TCP segments from and to some addresses with a reset.

    Other packets pass, and so do resets.
    """
    rules = {
        direction: [
            f'{_address_match(name, direction)} {_ANSWER} comment "{direction}_refused"'
            for name in elements
        ]
        for direction in directions
    }
    sets = {name: _ADDRESS_SETS[name] for name in elements}
    return _table(table, sets, rules) + add_elements(table, elements, lasts_s)


def resetting_table(table: str, elements: Elements, lasts_s: float) -> str:
    """Return a script that answers the segments of some TCP connections with a reset.

    An element is ``PEER . PEER_PORT . OWN_PORT``. Both sides of a connection get a reset with the
    next segment of either side.
    """
    address_types = {"v4": "ipv4_addr", "v6": "ipv6_addr"}
    sets = {
        name: f"type {address_types[name]} . inet_service . inet_service; flags timeout;"
        for name in elements
    }
    rules: dict[str, list[str]] = {"in": [], "out": []}
    for name in elements:
        family = _family(name)
        rules["in"].append(
            f'{family} saddr . tcp sport . tcp dport @{name} {_ANSWER} comment "in_reset"'
        )
        rules["out"].append(
            f'{family} daddr . tcp dport . tcp sport @{name} {_ANSWER} comment "out_reset"'
        )
    return _table(table, sets, rules) + add_elements(table, elements, lasts_s)


def add_elements(table: str, elements: Elements, lasts_s: float) -> str:
    """Return a script that adds elements which time out in the kernel."""
    timeout_ms = max(1, round(1000 * lasts_s))
    return "".join(
        f"add element inet {table} {name} "
        f"{{ {', '.join(f'{element} timeout {timeout_ms}ms' for element in items)} }}\n"
        for name, items in elements.items()
    )


def renew_elements(table: str, elements: Elements, lasts_s: float) -> str:
    """Return a script that lets the time of elements begin anew, in one transaction.

    Kernels before 6.12 keep the time of an element that is added again.
    """
    flushes = "".join(f"flush set inet {table} {name}\n" for name in elements)
    return flushes + add_elements(table, elements, lasts_s)


def apply(script: str) -> None:
    """Apply a script as one transaction. Raise Unable if the kernel refuses."""
    run_tool("nft", "-f", "-", script=script)


def check(script: str) -> None:
    """Have the kernel check a script, which changes nothing. Raise Unable if it refuses."""
    run_tool("nft", "-c", "-f", "-", script=script)


def delete(table: str) -> None:
    """Delete a table, if there is one. Raise Unable if the kernel refuses."""
    apply(f"table inet {table} {{}}\ndelete table inet {table}\n")  # no error if it is gone


def listing(table: str) -> str:
    """Return a table as text. Raise Unable if there is none."""
    return run_tool("nft", "list", "table", "inet", table)


def tables() -> list[str]:
    """Return the names of all tables of the family inet."""
    lines = run_tool("nft", "list", "tables", "inet").splitlines()
    return [line.split()[2] for line in lines if line.startswith("table inet ")]


def packets(text: str) -> dict[str, dict[str, int]]:
    """Return the packets that the rules of a table have counted: direction, counter, number."""
    counts: dict[str, dict[str, int]] = {}
    for number, direction, name in _COUNTER.findall(text):
        counters = counts.setdefault(direction, {})
        counters[name] = counters.get(name, 0) + int(number)
    return counts


def has_elements(text: str) -> bool:
    """Return whether a set of a table has an element whose time is not over."""
    return _ELEMENTS in text


def _table(table: str, sets: Mapping[str, str], rules: Mapping[str, Sequence[str]]) -> str:
    lines = [f"table inet {table} {{"]
    lines += [f"set {name} {{ {definition} }}" for name, definition in sets.items()]
    for direction, chain_rules in rules.items():
        name, kind, hook = _CHAINS[direction]
        lines.append(f"chain {name} {{ type {kind} hook {hook} priority -300; policy accept;")
        lines += [*chain_rules, "}"]
    return "\n".join([*lines, "}", ""])


def _address_match(set_name: str, direction: str) -> str:
    interface, side = ("iifname", "saddr") if direction == "in" else ("oifname", "daddr")
    return f'{interface} != "lo" {_family(set_name)} {side} @{set_name}'


def _family(set_name: str) -> str:
    return "ip" if set_name == "v4" else "ip6"


def _chance(share: float) -> int:
    return max(1, round(share * _RANDOM_STEPS))
