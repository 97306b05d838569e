"""Faults that change the size of the world: a request, a spot notice, a job of higher priority.

-> coordinator/handlers/on_size_request.py receives the request; elastic/policy.py decides on it.
-> substrate/cluster/job_cluster.py starts the nodes that are added.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from chaoskit.config import RunConfig
from chaoskit.elastic.settings import ElasticPolicy
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import AgentHeard, Evidence, SizeRequest, WorldFormed
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NODE_LOST_CAUSES, require_no_replacements
from chaoskit.faults.processes.signals import all_gone, look_up, signal_all
from chaoskit.faults.target import Target
from chaoskit.wire.messages import (
    Answered,
    Formed,
    Heartbeat,
    LendNodes,
    Plan,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
)

_POLICY = '{{"minReplicas": 2, "maxReplicas": 4}}'  # braces as str.format reads them
_EXAMPLE = f'chaos.run("gpt", nodes=4, steps=60, elastic={_POLICY}, faults=[{{fault}}])'
_UNLISTED = "it is wanted, not counted among the faults of a cluster"
_IMPACT = "the world moves at a step boundary; no step is lost, and no rank is given up"
_SENT_AGAIN_S = 1.0  # a request may be lost with a coordinator


@dataclass(frozen=True, kw_only=True)
class Scale(Fault):
    """Ask for a world of ``to`` nodes; missing nodes are started.

    A request that is refused leaves the fault without evidence.

    Args:
        to: a size that the elastic policy allows.
    """

    rank: int | str = 0
    to: int

    family: ClassVar[str] = "elastic"
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "the world is to have another size from now on"
    evidence: ClassVar[str] = "every rank of a world of that size has built its group"
    stands_for: ClassVar[str] = "an operator, or a scheduler, that gives or takes nodes"
    unlisted: ClassVar[str] = _UNLISTED
    impact: ClassVar[str] = _IMPACT
    sample: ClassVar[Mapping[str, Any]] = {"to": 3, "at_step": 20}
    example: ClassVar[str] = _EXAMPLE

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.to < 1:
            raise BadInput("to", self.to, "use 1 or more nodes")

    def require(self, config: RunConfig) -> None:
        policy = _require_policy(self, config)
        if self.to not in policy.sizes:
            raise BadInput(
                "to",
                self.to,
                f"use a size that the elastic policy allows: {policy.sizes_in_words}",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        world = _FormedWorld(target)
        answer = await _request_answer(target, ScaleTo(target.fault_id, self.to, "the harness"))
        if not answer.accepted:
            return
        await target.heard(lambda: (world.size or len(target.places)) == self.to)
        # no world was formed if a loss had given this one the size before
        words = (
            f"generation {world.generation} of {self.to} ranks is formed"
            if world.size
            else f"{self.to} ranks trained already"
        )
        yield WorldFormed(
            subject=SizeRequest(target.fault_id), source="the ranks", size=self.to, seen=words
        )


@dataclass(frozen=True, kw_only=True)
class AddNode(Fault):
    """Add a node.

    A lost node comes back under its name, with nothing in memory; if none was lost, a new one
    comes. The elastic policy decides whether and when it is used.
    """

    rank: int | str = 0

    family: ClassVar[str] = "elastic"
    of_runtime: ClassVar[bool] = True
    needs_standby: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "there is a node more than before"
    evidence: ClassVar[str] = "the coordinator hears its agent"
    stands_for: ClassVar[str] = (
        "spot instances that are there again, and capacity that a cluster has to spare"
    )
    unlisted: ClassVar[str] = _UNLISTED
    impact: ClassVar[str] = (
        "the world grows at a step boundary if its policy wants that; no rank is given up"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    example: ClassVar[str] = _EXAMPLE

    def require(self, config: RunConfig) -> None:
        _require_policy(self, config)
        require_no_replacements(self, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        cluster, heartbeats = target.cluster, target.listen(Heartbeat)
        lost_node = next((node for node in cluster.nodes if not cluster.node(node)), None)
        if lost_node is None:
            cluster.provide(len(cluster.nodes) + 1)
        else:
            await cluster.replace(lost_node)
        node, since_ns = lost_node or cluster.nodes[-1], time.monotonic_ns()
        target.release()
        async for beat in heartbeats:
            if beat.node == node and beat.sent_ns > since_ns:  # not of the old agent
                words = f"the agent of {node} is heard"
                yield AgentHeard(
                    subject=SizeRequest(target.fault_id), source="the coordinator", seen=words
                )
                return


@dataclass(frozen=True, kw_only=True)
class TakeSpot(Fault):
    """Announce that the rank's node will be taken away, and take it when its time is over.

    Args:
        grace_s: seconds between the notice and the loss. Clouds give 30 s to 2 minutes.
    """

    grace_s: float = 2.0

    family: ClassVar[str] = "elastic"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"evicted"}
    effect: ClassVar[str] = "a node is announced to go away, and does"
    evidence: ClassVar[str] = (
        "every process of the node is gone; what it says is whether they were out of the world by then"
    )
    stands_for: ClassVar[str] = "spot instances that are reclaimed with a notice"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = (
        "the node's ranks leave at a step boundary, before it is gone; no step is lost"
    )
    example: ClassVar[str] = _EXAMPLE

    def require(self, config: RunConfig) -> None:
        if config.elastic is None:
            raise BadInput(
                "elastic", None, "give the run an elastic policy: otherwise it ignores the notice"
            )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("grace_s", self.grace_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes, world = look_up(target), _FormedWorld(target)
        target.send(SpotNotice(target.node, self.grace_s))
        target.release()
        while (left_s := self.grace_s - target.seconds_since) > 0:
            if await target.heard(
                lambda: world.is_without(target.node), within_s=min(_SENT_AGAIN_S, left_s)
            ):
                await target.sleep(self.grace_s - target.seconds_since)
            else:
                target.send(SpotNotice(target.node, max(0.0, self.grace_s - target.seconds_since)))
        is_out = world.is_without(target.node)
        target.acts()
        signal_all(processes[:1], signal.SIGKILL)  # the rest of the node ends with its agent
        evidence = await all_gone(target, processes)
        yield msgspec.structs.replace(
            evidence, more=f", {'' if is_out else 'not '}out of the world by then"
        )


@dataclass(frozen=True, kw_only=True)
class Demand(Fault):
    """Let a job of higher priority ask for nodes, and give them back later.

    If it is promised none, the fault is without evidence.

    Args:
        nodes: number of nodes that it asks for; it may be promised fewer.
        grace_s: seconds until it needs them.
        return_after_s: seconds for which it keeps them.
    """

    rank: int | str = 0
    nodes: int = 1
    grace_s: float = 2.0
    return_after_s: float = 0.5

    family: ClassVar[str] = "elastic"
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "a job of higher priority takes nodes away, and gives them back"
    evidence: ClassVar[str] = "a world is formed without the nodes that the other job was promised"
    stands_for: ClassVar[str] = "priority classes of a scheduler, such as Kubernetes' or Kueue's"
    unlisted: ClassVar[str] = _UNLISTED
    impact: ClassVar[str] = _IMPACT
    sample: ClassVar[Mapping[str, Any]] = {"nodes": 1, "at_step": 20}
    example: ClassVar[str] = _EXAMPLE

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.nodes < 1:
            raise BadInput("nodes", self.nodes, "use 1 or more")
        require_seconds("grace_s", self.grace_s)
        require_seconds("return_after_s", self.return_after_s)

    def require(self, config: RunConfig) -> None:
        _require_policy(self, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        world = _FormedWorld(target)
        answer = await _request_answer(
            target, LendNodes(target.fault_id, target.fault_id, self.nodes, self.grace_s)
        )
        if not answer.nodes:
            return
        await target.heard(lambda: all(map(world.is_without, answer.nodes)))
        words = f"{', '.join(answer.nodes)} left for another job, {target.seconds_since:.1f} s after it had asked"
        yield WorldFormed(
            subject=SizeRequest(target.fault_id), source="the ranks", size=world.size, seen=words
        )
        await target.sleep(self.return_after_s)
        target.lifted()
        target.send(ReturnNodes(target.fault_id))


def _require_policy(fault: Fault, config: RunConfig) -> ElasticPolicy:
    """Return the elastic policy of the run. Raise BadInput if it has none."""
    if config.elastic is None:
        raise BadInput(
            "elastic", None, f"give the run an elastic policy: {fault.kind} changes its size"
        )
    return config.elastic


async def _request_answer(target: Target, request: ScaleTo | LendNodes) -> Answered:
    """Send a request, release the rank, and return the answer.

    The request may be lost with a coordinator, so it is sent again until the answer comes. It does
    not return if the run ends first.
    """
    answers = target.listen(Answered)
    target.send(request)
    target.release()

    def look() -> Answered | None:
        return next(
            (answer for answer in answers.drain() if answer.request == request.request), None
        )

    while (answer := await target.heard(look, within_s=_SENT_AGAIN_S)) is None:
        target.send(request)
    return answer


class _FormedWorld:
    """The newest membership since the act in which all members have built their group."""

    def __init__(self, target: Target) -> None:
        self._messages = target.listen(Plan, Formed)
        self._plan: Plan | None = None
        self._settled: Plan | None = None
        self._formed: set[str] = set()  # members of the newest plan that have built their group

    @property
    def settled(self) -> Plan | None:
        """The plan of that membership; None before the first."""
        for message in self._messages.drain():
            if isinstance(message, Plan):
                self._plan, self._formed = message, set()
            elif self._plan is not None and message.generation == self._plan.generation:
                self._formed.add(message.worker)
                if self._formed.issuperset(member.worker for member in self._plan.members):
                    self._settled = self._plan
        return self._settled

    @property
    def size(self) -> int:
        """The number of its ranks; 0 before the first."""
        return 0 if self.settled is None else len(self.settled.members)

    @property
    def generation(self) -> int:
        """The number of its generation; 0 before the first."""
        return 0 if self.settled is None else self.settled.generation

    def is_without(self, node: str) -> bool:
        """Return True if there is such a membership, and it has no rank on ``node``."""
        return self.settled is not None and all(
            member.node != node for member in self.settled.members
        )
