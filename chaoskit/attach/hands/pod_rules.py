"""Requests to network hands that carry out an action on the traffic between nodes. Pure.

-> attach/hands/traffic.py makes the requests. ``docs/architecture/hand.md``: the operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.traffic import Block, Narrow, Way

IN, OUT = "in", "out"
#: Operations of the hand that each kind of action needs.
_NO_WAY = "no way between two nodes is left without the coordinator, which no attached job has"


class PodRules(NamedTuple):
    """Packets that one hand blocks.

    Attributes:
        node: the node of the hand.
        peers: nodes at the other end of the ways.
        directions: ``in`` for packets from the peers to the node, ``out`` for those to the peers.
    """

    node: str
    peers: tuple[str, ...]
    directions: tuple[str, ...]


def block_rules(change: Block) -> list[PodRules]:
    """Return the rules that block the ways of a change, in as few pods as a greedy choice gives.

    Raises:
        HarnessError: if hands cannot make the change, or no way exists.
    """
    if change.port:
        raise HarnessError(
            f"port {change.port}: an attached job has no store to cut off: leave out apart_from"
        )
    if change.loud and change.share < 1:
        raise HarnessError(
            f"share {change.share:g}: a hand resets all segments or none: use a share of 1"
        )
    ways = _existing(change.ways)
    if not ways:
        raise HarnessError(f"{_NO_WAY}: name nodes in apart_from")
    return rules_of_ways(ways)


def block_operation(change: Block) -> tuple[str, dict[str, Any]]:
    """Return the operation of the hand that a change needs, and its further fields."""
    if change.loud:
        return "refuse", {}
    if change.share < 1:
        return "loss", {"share": change.share}
    return "cut", {}


def rules_of_ways(ways: Iterable[Way]) -> list[PodRules]:
    """Return rules that block each way once, and no other.

    A way can be blocked in the pod of its source or of its target. The node that most of the
    remaining ways touch gets its rules first. Of equal nodes the first target is taken: a packet
    that is dropped there has left its sender, as one that a switch loses.
    """
    remaining = dict.fromkeys(ways)
    rules: list[PodRules] = []
    while remaining:
        count = Counter(target for _, target in remaining)
        count.update(source for source, _ in remaining)
        node = max(count, key=lambda station: count[station])
        by_peer: dict[str, set[str]] = {}
        for source, target in [way for way in remaining if node in way]:
            del remaining[source, target]
            peer, direction = (source, IN) if target == node else (target, OUT)
            by_peer.setdefault(peer, set()).add(direction)
        by_directions: dict[tuple[str, ...], list[str]] = {}
        for peer, directions in by_peer.items():
            by_directions.setdefault(tuple(sorted(directions)), []).append(peer)
        rules += [PodRules(node, tuple(peers), key) for key, peers in by_directions.items()]
    return rules


def narrowed_nodes(change: Narrow) -> list[str]:
    """Return the nodes whose pods send with a limit.

    Raises:
        HarnessError: if ways are to be limited, or no node is named.
    """
    if change.ways:
        raise HarnessError("a hand limits all that a pod sends, not a part of it")
    if not (narrowed := [node for node in dict.fromkeys(change.stations) if node != COORDINATOR]):
        raise HarnessError(f"{_NO_WAY}: name nodes")
    return narrowed


def count_of(evidence: Mapping[str, Any]) -> int:
    """Return the packets that an effect has dropped, refused or held up; 0 without counters."""
    counters: Mapping[str, Mapping[str, int]] = evidence.get("packets", {})
    packets = sum(
        counts.get(name, 0) for counts in counters.values() for name in ("dropped", "refused")
    )
    return packets + int(evidence.get("held_up", 0))


def _existing(ways: Iterable[Way]) -> list[Way]:
    """Return the ways between two nodes, each once."""
    return [way for way in dict.fromkeys(ways) if COORDINATOR not in way and way[0] != way[1]]
