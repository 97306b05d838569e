"""Nodes that are lost as machines are: at once, with all that they had in memory, and without a word."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import DRAWN_ROLES, found, require_seconds
from chaoskit.faults.evidence import AgentHeard, Evidence, NodeGone
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.partitions import EXAMPLE
from chaoskit.faults.nodes.node import KillNode, NodeFault, require_no_replacements
from chaoskit.faults.processes.signals import all_gone, gone, look_up
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.traffic import Block
from chaoskit.substrate.limits import capabilities
from chaoskit.wire.messages import Heartbeat


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
    impact: ClassVar[str] = (
        "the lease of the node ends without a word, and its workers are given up"
    )
    undo: ClassVar[str] = "the rule vanishes with the network of the run"
    substrates: ClassVar[tuple[str, ...]] = ("netns", "docker")
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return capabilities.unavailable(Block)

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (Block,)

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {
            "unreachable"
        }  # a rank that waits for the silent node may find out first

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        target.cluster.lose(target.node)
        target.release()
        seen = await all_gone(target, processes)

        def silent() -> NodeGone | None:
            packets = target.cluster.dropped(target.node)
            more = f"; {packets} packets from and to it were dropped"
            return msgspec.structs.replace(seen, more=more) if packets else None

        yield found(await target.seen(silent))
        target.last_word = silent


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
    needs_standby: ClassVar[bool] = True
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

    def require(self, config: RunConfig) -> None:
        require_no_replacements(self, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes, heard = look_up(target), target.listen(Heartbeat)
        target.cluster.lose(target.node)
        target.release()
        seen = await all_gone(target, processes)
        await target.sleep(self.back_after_s - target.seconds_since)
        target.lifted()
        await target.cluster.replace(target.node)
        agent = target.cluster.root(target.node)
        async for beat in heard:
            if (
                beat.node == target.node and beat.sent_ns > target.lifted_ns
            ):  # else it is of the agent before this one
                told = f"{seen}; the agent that came in its place (pid {agent.pid}) was welcomed, and is heard"
                yield AgentHeard(subject=target.whole_node, source="the coordinator", seen=told)
                return


@dataclass(frozen=True, kw_only=True)
class Rack(NodeFault):
    """Lose every node of the rack in which the rank's node stands, at once; see ``rack_nodes`` of the run.

    Where nodes have networks of their own they fall silent, as with ``LoseNode``.
    """

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "all nodes of one rack are gone at once, with all that was in their memory"
    )
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
            raise BadInput(
                "rank",
                self.rank,
                "use a rank, 'any' or 'most_shards': ranks of one rack are lost together",
            )

    def require(self, config: RunConfig) -> None:
        if not config.rack_nodes:
            raise BadInput(
                "rack_nodes",
                config.rack_nodes,
                f"say how many nodes a rack has: {self.kind} needs it",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        look_up(target)
        racks = {
            node: processes for node in target.rack if (processes := target.cluster.node(node))
        }
        target.struck_nodes = set(target.rack)
        for node in racks:
            target.acts()
            target.cluster.lose(node)
        target.release()
        await target.seen(lambda: all(gone(processes, node) for node, processes in racks.items()))
        first, *others = [gone(processes, node) for node, processes in racks.items()]
        yield msgspec.structs.replace(found(first), more="".join(f"; {one}" for one in others))
