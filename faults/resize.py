"""The world changes its size: on request, as a node will be taken away, or as a job of higher priority wants nodes."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.messages import (
    Answered,
    Formed,
    Heartbeat,
    LendNodes,
    Message,
    Plan,
    ReturnNodes,
    ScaleTo,
    SpotNotice,
)
from faults import incidents
from faults.base import Fault, Target, require_seconds
from faults.incidents import IncidentKind
from faults.node import NodeFault, all_gone, look_up, signal_all

_POLICY = '{{"minReplicas": 2, "maxReplicas": 4}}'  # braces as str.format reads them
_EXAMPLE = f'chaos.run("gpt", nodes=4, steps=60, elastic={_POLICY}, faults=[{{fault}}])'
_TOLD_AGAIN_S = 1.0  # an order may be lost with a coordinator


@dataclass(frozen=True, kw_only=True)
class ResizeFault(Fault):
    """Base of what changes the size of the world. Nobody may be lost by it."""

    rank: int | str = 0

    family: ClassVar[str] = "elastic"
    unlisted: ClassVar[str] = "it is wanted, not counted among the faults of a cluster"
    impact: ClassVar[str] = "the world moves at a step boundary; no step is lost, and nobody is given up"
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
            raise BadInput("elastic", None, f"give the run an elastic policy: {self.kind} changes its size")


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
            raise BadInput("to", self.to, f"use a size that the elastic policy allows: {config.elastic.sizes_in_words}")

    def inject(self, target: Target) -> None:
        _say(target, ScaleTo(target.fault_id, self.to, "the harness"))
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        _follow(target, message)
        _hear(target, message)
        return False

    def observe(self, target: Target) -> str | None:
        answer, settled = target.notes.get("answer"), target.notes.get("settled")
        if answer is None or not answer.accepted:
            return None
        if len(settled.members if settled is not None else target.places) != self.to:
            return None
        if settled is None:  # a loss had made the world so small before
            return f"{self.to} ranks trained already"
        return f"generation {settled.generation} of {self.to} ranks is formed"


@dataclass(frozen=True, kw_only=True)
class AddNode(ResizeFault):
    """Have a node come: one that is gone comes back under its name, with nothing in memory; else a new one.

    Whether and when it is used is for the elastic policy to say.
    """

    replaces_node: ClassVar[bool] = True
    effect: ClassVar[str] = "there is a node more than before"
    evidence: ClassVar[str] = "the coordinator hears its agent"
    stands_for: ClassVar[str] = "spot instances that are there again, and capacity that a cluster has to spare"
    impact: ClassVar[str] = "the world grows at a step boundary if its policy wants that; nobody is given up"
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}

    def inject(self, target: Target) -> None:
        cluster = target.cluster
        gone = next((node for node in cluster.nodes if not cluster.node(node)), None)
        if gone is None:
            cluster.provide(len(cluster.nodes) + 1)
        else:
            cluster.replace(gone)
        target.notes["node"] = gone or cluster.nodes[-1]
        target.notes["since_ns"] = time.monotonic_ns()
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        if isinstance(message, Heartbeat) and message.node == target.notes["node"]:
            # what was sent earlier is of the agent before this one
            target.notes["heard"] = message.sent_ns > target.notes["since_ns"]
        return False

    def observe(self, target: Target) -> str | None:
        return f"the agent of {target.notes['node']} is heard" if target.notes.get("heard") else None


@dataclass(frozen=True, kw_only=True)
class TakeSpot(NodeFault):
    """Tell the run that the rank's node will be taken away, and take it when its time is over.

    Args:
        grace_s: how long before. Clouds give 30 s to 2 minutes.
    """

    rank: int | str
    grace_s: float = 2.0

    family: ClassVar[str] = "elastic"
    effect: ClassVar[str] = "a node is announced to go away, and does"
    evidence: ClassVar[str] = (
        "every process of the node is gone; what it says is whether they were out of the world by then"
    )
    stands_for: ClassVar[str] = "spot instances that are reclaimed with a notice"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = "the node's ranks leave at a step boundary, before it is gone; no step is lost"
    ends_node: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    example: ClassVar[str] = _EXAMPLE

    def require(self, config: RunConfig) -> None:
        if config.elastic is None:
            raise BadInput("elastic", None, "give the run an elastic policy: else a notice means nothing to it")

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("grace_s", self.grace_s)

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"evicted"}

    def inject(self, target: Target) -> None:
        look_up(target)
        _say(target, SpotNotice(target.node, self.grace_s))
        target.pull("none")

    def next_act_s(self, target: Target) -> float:
        return math.inf if "taken" in target.notes else self.grace_s

    def again(self, target: Target, message: Any) -> bool:
        _follow(target, message)
        if "taken" not in target.notes:
            if not self._is_out(target):
                _say_again(target, SpotNotice(target.node, max(0.0, self.grace_s - target.seconds_since)))
            if target.seconds_since >= self.grace_s:
                self._take(target)
        return False

    def _is_out(self, target: Target) -> bool:
        settled = target.notes.get("settled")
        return settled is not None and all(member.node != target.node for member in settled.members)

    def _take(self, target: Target) -> None:
        target.notes["taken"] = f"{'' if self._is_out(target) else 'not '}out of the world by then"
        target.acted_ns = time.monotonic_ns()
        signal_all(target, target.notes["processes"][:1], signal.SIGKILL)  # its agent takes along what is left

    def observe(self, target: Target) -> str | None:
        if "taken" not in target.notes or (gone := all_gone(target)) is None:
            return None
        return f"{gone}, {target.notes['taken']}"


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

    def inject(self, target: Target) -> None:
        _say(target, LendNodes(target.fault_id, target.fault_id, self.nodes, self.grace_s))
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        _follow(target, message)
        if "had_s" not in target.notes:
            _hear(target, message)
            if self._has_them(target):
                target.notes["had_s"] = time.monotonic()
        elif not target.lifted_ns and time.monotonic() >= target.notes["had_s"] + self.return_after_s:
            target.lifted_ns = time.monotonic_ns()
            _say(target, ReturnNodes(target.fault_id))
        return False

    def _has_them(self, target: Target) -> bool:
        answer, settled = target.notes.get("answer"), target.notes.get("settled")
        if answer is None or not answer.nodes or settled is None:
            return False
        return all(member.node not in answer.nodes for member in settled.members)

    def observe(self, target: Target) -> str | None:
        if "had_s" not in target.notes:
            return None
        return f"{', '.join(target.notes['answer'].nodes)} left for another job, within {self.grace_s:g} s"


def _say(target: Target, message: Message) -> None:
    target.notes["said"], target.notes["said_s"] = message, time.monotonic()
    with contextlib.suppress(OSError):  # a coordinator that is gone: it is said again
        target.cluster.send(message)


def _hear(target: Target, message: Any) -> None:
    """Note the answer to what was said. It may be lost with a coordinator: until there is one it is said again."""
    if isinstance(message, Answered) and message.request == target.fault_id:
        target.notes["answer"] = message
    if "answer" not in target.notes:
        _say_again(target, target.notes["said"])


def _say_again(target: Target, message: Message) -> None:
    if time.monotonic() > target.notes["said_s"] + _TOLD_AGAIN_S:
        _say(target, message)


def _follow(target: Target, message: Any) -> None:
    """Note the newest plan since the act of which every member has built its group."""
    if isinstance(message, Plan):
        target.notes["plan"], target.notes["formed"] = message, set()
    elif isinstance(message, Formed) and (plan := target.notes.get("plan")) is not None:
        if message.generation == plan.generation:
            target.notes["formed"].add(message.worker)
        if target.notes["formed"].issuperset(member.worker for member in plan.members):
            target.notes["settled"] = plan
