"""Requests to network hands that carry out an action on the traffic between nodes. Pure.

-> attach/hands/traffic.py makes the requests. ``docs/architecture/hand.md``: the operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from chaoskit.errors import HarnessError
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.traffic import Block, Degrade, Narrow, Unplug, Way

IN, OUT = "in", "out"
#: Operations of the hand that each kind of action needs.
_OPERATIONS: dict[type[Action], tuple[str, ...]] = {
    Block: ("cut", "loss", "refuse"),
    Narrow: ("bandwidth",),
}
#: Operations that ``hello`` tries: a limit of bandwidth needs a table of rules, as a cut does.
_TRIALS: dict[type[Action], tuple[str, ...]] = {
    Block: _OPERATIONS[Block],
    Narrow: ("cut",),
}
_NOT_BY_HANDS: dict[type[Action], str] = {
    Degrade: "a hand does not delay packets: use Loss or Bandwidth",
    Unplug: "the link of a pod stays up, as no hand takes it down: use Cut",
}
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


def why_not(action: type[Action], hello: Mapping[str, Any]) -> str:
    """Return why a network hand cannot carry out a kind of action; "" if nothing is against it.

    Args:
        action: the kind of action.
        hello: the hand's answer to ``hello``. It has tried rules, but no limit of bandwidth.
    """
    if action not in _OPERATIONS:
        return _NOT_BY_HANDS.get(action, f"a network hand does not carry out {action.__name__}")
    for operation in _OPERATIONS[action]:
        if operation not in hello["operations"]:
            return (
                f"the hand lacks the operation {operation}: use the image of this chaoskit version"
            )
    for operation in _TRIALS[action]:
        if refusal := hello["unable"].get(operation):
            return f"{refusal['reason']}: {refusal['remedy']}"
    return ""


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


def narrowed_nodes(change: Narrow, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose pods send with a limit.

    Args:
        change: the change. Ways are possible if those of each source go to all other nodes.
        nodes: all nodes of the job; empty for those that the ways name.

    Raises:
        HarnessError: if hands cannot make the change, or no node is named.
    """
    ways = _existing(change.ways)
    every_node = set(nodes) or {station for way in ways for station in way}
    targets: dict[str, set[str]] = {}
    for source, target in ways:
        targets.setdefault(source, set()).add(target)
    for source, own_targets in targets.items():
        if missing := sorted(every_node - own_targets - {source}):
            raise HarnessError(
                f"a hand limits all that {source} sends, not only a part: leave out per_peer,"
                f" or add the ways to {', '.join(missing)}"
            )
    stations = [*change.stations, *targets]
    if not (narrowed := [node for node in dict.fromkeys(stations) if node != COORDINATOR]):
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
