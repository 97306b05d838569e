"""Faults ``LoseNode``, ``ReplaceNode`` and ``Rack``: nodes are lost with all memory, in silence.

-> substrate/cluster/nodes.py ends the processes of a node (``lose``); job_cluster.py starts another
one under its name.
-> coordinator/detectors/contact.py: when a silent node is given up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import DRAWN_ROLES, Fault, require_seconds
from chaoskit.faults.evidence import AgentHeard, Evidence, NodeGone
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.network.sides import EXAMPLE
from chaoskit.faults.nodes.node import NODE_LOST_CAUSES, KillNode, require_no_replacements
from chaoskit.faults.processes.signals import all_gone, gone, look_up
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.core.traffic import Block
from chaoskit.substrate.limits import capabilities
from chaoskit.wire.messages import Heartbeat


@dataclass(frozen=True, kw_only=True)
class LoseNode(Fault):
    """Lose everything of the rank's node at once and in silence.

    No packet says that its connections end. On the substrate ``local`` nodes have no networks that
    could fall silent: there this would be ``KillNode``.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    #: A waiting rank may report the node first, as unreachable.
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (Block,)
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

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        target.cluster.lose(target.node)
        target.release()
        evidence = await all_gone(target, processes)

        def evidence_of_silence() -> NodeGone | None:
            packets = target.cluster.dropped(target.node)
            more = f"; {packets} packets from and to it were dropped"
            return msgspec.structs.replace(evidence, more=more) if packets else None

        yield await target.seen(evidence_of_silence)
        target.last_word = evidence_of_silence


@dataclass(frozen=True, kw_only=True)
class ReplaceNode(Fault):
    """Lose the rank's node, and start another one under its name.

    The new one has nothing in memory, and a network that works.

    Args:
        back_after_s: seconds after the act at which the other one starts, if the lost one has
            ended by then.
    """

    back_after_s: float = 0.5

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
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

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("back_after_s", self.back_after_s)

    def require(self, config: RunConfig) -> None:
        require_no_replacements(self, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes, heartbeats = look_up(target), target.listen(Heartbeat)
        target.cluster.lose(target.node)
        target.release()
        evidence = await all_gone(target, processes)
        await target.sleep(self.back_after_s - target.seconds_since)
        target.lifted()
        await target.cluster.replace(target.node)
        agent = target.cluster.root(target.node)
        async for beat in heartbeats:
            if beat.node == target.node and beat.sent_ns > target.lifted_ns:  # not of the old agent
                words = f"{evidence}; the agent that came in its place (pid {agent.pid}) was welcomed, and is heard"
                yield AgentHeard(subject=target.whole_node, source="the coordinator", seen=words)
                return


@dataclass(frozen=True, kw_only=True)
class Rack(Fault):
    """Lose every node of the rack of the rank's node at once; see ``rack_nodes`` of the run.

    Where nodes have networks of their own they fall silent, as with ``LoseNode``.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    effect: ClassVar[str] = (
        "all nodes of one rack are gone at once, with all that was in their memory"
    )
    evidence: ClassVar[str] = "every process of every node of the rack is gone"
    stands_for: ClassVar[str] = "racks that lose their power, their cooling or their switch"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.POWER, incidents.SWITCH)
    impact: ClassVar[str] = "the workers of all these nodes are given up"
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, rack_nodes=2, steps=60, faults=[{fault}])'

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
                f"give the number of nodes of a rack: {self.kind} needs it",
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

        def all_nodes_gone() -> list[NodeGone] | None:
            evidences = [gone(processes, node) for node, processes in racks.items()]
            nodes_gone = [evidence for evidence in evidences if evidence is not None]
            return nodes_gone if len(nodes_gone) == len(racks) else None

        first, *others = await target.seen(all_nodes_gone)
        yield msgspec.structs.replace(first, more="".join(f"; {other}" for other in others))
