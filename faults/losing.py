"""Nodes that are lost as machines are: at once, with all that they had in memory, and without a word."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.messages import Heartbeat
from chaoskit.substrate import abilities
from chaoskit.substrate.base import Process
from chaoskit.substrate.traffic import Block
from faults import incidents
from faults.base import DRAWN_ROLES, Target, require_seconds
from faults.incidents import IncidentKind
from faults.network import EXAMPLE
from faults.node import KillNode, NodeFault, all_gone, look_up


@dataclass(frozen=True, kw_only=True)
class LoseNode(NodeFault):
    """Lose everything of the rank's node at once and in silence: no packet says that its connections end.

    On the substrate ``local`` nodes have no networks that could fall silent: there this would be ``KillNode``.
    """

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "one node is gone without a word: its network, its processes, and all that was in their memory"
    )
    evidence: ClassVar[str] = (
        "every process of the node is gone, and the kernel dropped the packets that would tell of it"
    )
    stands_for: ClassVar[str] = "machines that lose their power, or panic"
    counted: ClassVar[tuple[IncidentKind, ...]] = KillNode.counted
    impact: ClassVar[str] = "the lease of the node ends without a word, and its workers are given up"
    undo: ClassVar[str] = "the rule vanishes with the network of the run"
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return abilities.unavailable(Block)

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}  # whoever waits for the silent node may find out first

    def inject(self, target: Target) -> None:
        look_up(target)
        target.cluster.lose(target.node)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        gone = all_gone(target)
        packets = target.cluster.dropped(target.node) if gone else 0
        return f"{gone}; {packets} packets from and to it were dropped" if packets else None


@dataclass(frozen=True, kw_only=True)
class ReplaceNode(NodeFault):
    """Lose the rank's node, and start another one under its name: with nothing in memory, on a network that works.

    Args:
        back_after_s: when the other one starts.
    """

    back_after_s: float = 0.5

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    replaces_node: ClassVar[bool] = True
    effect: ClassVar[str] = "one node is lost at once, and an empty one comes in its place"
    evidence: ClassVar[str] = (
        "every process of the node is gone, and the coordinator hears the agent that came in its place"
    )
    stands_for: ClassVar[str] = (
        "machines and containers that are started anew, and spare machines that take over a name"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER, incidents.MAINTENANCE)
    impact: ClassVar[str] = (
        "the workers of the node are given up; the new one is fresh capacity, and the world is whole again"
    )

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("back_after_s", self.back_after_s)

    def inject(self, target: Target) -> None:
        look_up(target)
        target.cluster.lose(target.node)
        target.pull("none")

    def next_act_s(self, target: Target) -> float:
        return math.inf if "agent" in target.notes else self.back_after_s

    def again(self, target: Target, message: Any) -> bool:
        if "agent" not in target.notes:
            self._replace(target)
        elif isinstance(message, Heartbeat) and message.node == target.node:
            # what was sent earlier is of the agent before this one
            target.notes["heard"] = message.sent_ns > target.lifted_ns
        return False

    def _replace(self, target: Target) -> None:
        gone = target.notes.setdefault("gone", all_gone(target))
        if gone is None:
            del target.notes["gone"]
        elif target.seconds_since >= self.back_after_s:
            target.lifted_ns = time.monotonic_ns()
            target.cluster.replace(target.node)
            target.notes["agent"] = target.cluster.node(target.node)[0]

    def observe(self, target: Target) -> str | None:
        if not target.notes.get("heard"):
            return None
        agent: Process = target.notes["agent"]
        return f"{target.notes['gone']}; the agent that came in its place (pid {agent.pid}) was welcomed, and is heard"


@dataclass(frozen=True, kw_only=True)
class Rack(NodeFault):
    """Lose every node of the rack in which the rank's node stands, at once; see ``rack_nodes`` of the run.

    Where nodes have networks of their own they fall silent, as with ``LoseNode``.
    """

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    effect: ClassVar[str] = "all nodes of one rack are gone at once, with all that was in their memory"
    evidence: ClassVar[str] = "every process of every node of the rack is gone"
    stands_for: ClassVar[str] = "racks that lose their power, their cooling or their switch"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.POWER, incidents.SWITCH)
    impact: ClassVar[str] = "the workers of all these nodes are given up"
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, rack_nodes=2, steps=60, faults=[{fault}])'

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.rank in DRAWN_ROLES and self.rank != "any":
            raise BadInput("rank", self.rank, "use a rank, 'any' or 'most_shards': ranks of one rack are lost together")

    def require(self, config: RunConfig) -> None:
        if not config.rack_nodes:
            raise BadInput("rack_nodes", config.rack_nodes, f"say how many nodes a rack has: {self.kind} needs it")

    def inject(self, target: Target) -> None:
        look_up(target)
        racks: Mapping[str, list[Process]] = {node: target.cluster.node(node) for node in target.rack}
        target.notes["rack"] = racks
        target.struck_nodes = set(target.rack)
        for node, processes in racks.items():
            if processes:
                target.acted_ns = time.monotonic_ns()
                target.cluster.lose(node)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        racks: Mapping[str, list[Process]] = target.notes["rack"]
        told = [all_gone(target, node, processes) for node, processes in racks.items() if processes]
        return "; ".join(filter(None, told)) if all(told) else None
