"""The world changes its size: on request, as a node will be taken away, or as a job of higher priority wants nodes."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import AgentHeard, Evidence, SizeRequest, WorldFormed
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NodeFault, require_no_replacements
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
_TOLD_AGAIN_S = 1.0  # an order may be lost with a coordinator


@dataclass(frozen=True, kw_only=True)
class ResizeFault(Fault):
    """Base of what changes the size of the world. No rank may be lost by it."""

    rank: int | str = 0

    family: ClassVar[str] = "elastic"
    unlisted: ClassVar[str] = "it is wanted, not counted among the faults of a cluster"
    impact: ClassVar[str] = (
        "the world moves at a step boundary; no step is lost, and no rank is given up"
    )
    of_runtime: ClassVar[bool] = True
    example: ClassVar[str] = _EXAMPLE

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset()

    def require(self, config: RunConfig) -> None:
        if config.elastic is None:
            raise BadInput(
                "elastic", None, f"give the run an elastic policy: {self.kind} changes its size"
            )


@dataclass(frozen=True, kw_only=True)
class Scale(ResizeFault):
    """Ask for a world of ``to`` nodes; where there are not as many, others are started.

    Args:
        to: a size that the elastic policy allows.
    """

    to: int

    effect: ClassVar[str] = "the world is to have another size from now on"
    evidence: ClassVar[str] = "every rank of a world of that size has built its group"
    stands_for: ClassVar[str] = "an operator, or a scheduler, that gives or takes nodes"
    sample: ClassVar[Mapping[str, Any]] = {"to": 3, "at_step": 20}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.to < 1:
            raise BadInput("to", self.to, "use 1 or more nodes")

    def require(self, config: RunConfig) -> None:
        super().require(config)
        assert config.elastic is not None
        if self.to not in config.elastic.sizes:
            raise BadInput(
                "to",
                self.to,
                f"use a size that the elastic policy allows: {config.elastic.sizes_in_words}",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        world = _World(target)
        answer = await _answered(target, ScaleTo(target.fault_id, self.to, "the harness"))
        if not answer.accepted:
            return
        await target.heard(lambda: (world.size or len(target.places)) == self.to)
        # else a loss had made the world so small before
        told = (
            f"generation {world.generation} of {self.to} ranks is formed"
            if world.size
            else f"{self.to} ranks trained already"
        )
        yield WorldFormed(
            subject=SizeRequest(target.fault_id), source="the ranks", size=self.to, seen=told
        )


@dataclass(frozen=True, kw_only=True)
class AddNode(ResizeFault):
    """Have a node come: one that is gone comes back under its name, with nothing in memory; else a new one.

    Whether and when it is used is for the elastic policy to say.
    """

    needs_standby: ClassVar[bool] = True
    effect: ClassVar[str] = "there is a node more than before"
    evidence: ClassVar[str] = "the coordinator hears its agent"
    stands_for: ClassVar[str] = (
        "spot instances that are there again, and capacity that a cluster has to spare"
    )
    impact: ClassVar[str] = (
        "the world grows at a step boundary if its policy wants that; no rank is given up"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}

    def require(self, config: RunConfig) -> None:
        super().require(config)
        require_no_replacements(self, config)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        cluster, heard = target.cluster, target.listen(Heartbeat)
        gone = next((node for node in cluster.nodes if not cluster.node(node)), None)
        if gone is None:
            cluster.provide(len(cluster.nodes) + 1)
        else:
            await cluster.replace(gone)
        node, since_ns = gone or cluster.nodes[-1], time.monotonic_ns()
        target.release()
        async for beat in heard:
            if (
                beat.node == node and beat.sent_ns > since_ns
            ):  # else it is of the agent before this one
                told = f"the agent of {node} is heard"
                yield AgentHeard(
                    subject=SizeRequest(target.fault_id), source="the coordinator", seen=told
                )
                return


@dataclass(frozen=True, kw_only=True)
class TakeSpot(NodeFault):
    """Tell the run that the rank's node will be taken away, and take it when its time is over.

    Args:
        grace_s: how long before. Clouds give 30 s to 2 minutes.
    """

    grace_s: float = 2.0

    family: ClassVar[str] = "elastic"
    effect: ClassVar[str] = "a node is announced to go away, and does"
    evidence: ClassVar[str] = (
        "every process of the node is gone; what it says is whether they were out of the world by then"
    )
    stands_for: ClassVar[str] = "spot instances that are reclaimed with a notice"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = (
        "the node's ranks leave at a step boundary, before it is gone; no step is lost"
    )
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    example: ClassVar[str] = _EXAMPLE

    def require(self, config: RunConfig) -> None:
        if config.elastic is None:
            raise BadInput(
                "elastic", None, "give the run an elastic policy: else a notice means nothing to it"
            )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("grace_s", self.grace_s)

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"evicted"}

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes, world = look_up(target), _World(target)
        target.say(SpotNotice(target.node, self.grace_s))
        target.release()
        while (left_s := self.grace_s - target.seconds_since) > 0:
            if await target.heard(
                lambda: world.is_without(target.node), within_s=min(_TOLD_AGAIN_S, left_s)
            ):
                await target.sleep(self.grace_s - target.seconds_since)
            else:
                target.say(SpotNotice(target.node, max(0.0, self.grace_s - target.seconds_since)))
        is_out = world.is_without(target.node)
        target.acts()
        signal_all(processes[:1], signal.SIGKILL)  # its agent takes along what is left
        seen = await all_gone(target, processes)
        yield msgspec.structs.replace(
            seen, more=f", {'' if is_out else 'not '}out of the world by then"
        )


@dataclass(frozen=True, kw_only=True)
class Demand(ResizeFault):
    """Let a job of higher priority ask for nodes, and give them back later.

    Args:
        nodes: how many it wants.
        grace_s: how soon.
        return_after_s: when it gives them back, after it had them.
    """

    nodes: int = 1
    grace_s: float = 2.0
    return_after_s: float = 0.5

    effect: ClassVar[str] = "a job of higher priority takes nodes away, and gives them back"
    evidence: ClassVar[str] = "a world is formed without the nodes that the other job was promised"
    stands_for: ClassVar[str] = "priority classes of a scheduler, such as Kubernetes' or Kueue's"
    sample: ClassVar[Mapping[str, Any]] = {"nodes": 1, "at_step": 20}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.nodes < 1:
            raise BadInput("nodes", self.nodes, "use 1 or more")
        require_seconds("grace_s", self.grace_s)
        require_seconds("return_after_s", self.return_after_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        world = _World(target)
        answer = await _answered(
            target, LendNodes(target.fault_id, target.fault_id, self.nodes, self.grace_s)
        )
        if not answer.nodes:
            return
        await target.heard(lambda: all(map(world.is_without, answer.nodes)))
        told = f"{', '.join(answer.nodes)} left for another job, {target.seconds_since:.1f} s after it had asked"
        yield WorldFormed(
            subject=SizeRequest(target.fault_id), source="the ranks", size=world.size, seen=told
        )
        await target.sleep(self.return_after_s)
        target.lifted()
        target.say(ReturnNodes(target.fault_id))


async def _answered(target: Target, request: ScaleTo | LendNodes) -> Answered:
    """Make a request, let the rank go on, and wait for the answer. It may be lost with a coordinator: say it again."""
    answers = target.listen(Answered)
    target.say(request)
    target.release()

    def look() -> Answered | None:
        return next(
            (answer for answer in answers.drain() if answer.request == request.request), None
        )

    while (answer := await target.heard(look, within_s=_TOLD_AGAIN_S)) is None:
        target.say(request)
    return answer


class _World:
    """The newest membership since the act of which every member has built its group."""

    def __init__(self, target: Target) -> None:
        self._heard = target.listen(Plan, Formed)
        self._plan: Plan | None = None
        self._settled: Plan | None = None
        self._formed: set[str] = set()

    @property
    def settled(self) -> Plan | None:
        """That membership; None before the first."""
        for message in self._heard.drain():
            if isinstance(message, Plan):
                self._plan, self._formed = message, set()
            elif self._plan is not None and message.generation == self._plan.generation:
                self._formed.add(message.worker)
                if self._formed.issuperset(member.worker for member in self._plan.members):
                    self._settled = self._plan
        return self._settled

    @property
    def size(self) -> int:
        """How many ranks it has; 0 before the first."""
        return 0 if self.settled is None else len(self.settled.members)

    @property
    def generation(self) -> int:
        """Of it; 0 before the first."""
        return 0 if self.settled is None else self.settled.generation

    def is_without(self, node: str) -> bool:
        """Whether there is one, and no rank of it is on ``node``."""
        return self.settled is not None and all(
            member.node != node for member in self.settled.members
        )
