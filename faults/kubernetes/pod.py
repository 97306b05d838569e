"""The pod of a node that goes: what the API server does is the act, and what its processes do the evidence."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import found
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NodeFault
from chaoskit.faults.processes.signals import all_gone, look_up
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.kubernetes.options import KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import (
    ContainerCrash,
    PodDeletion,
    PodEviction,
    PodPreemption,
)

OVER_SOURCE = "the end of the pod's first process, and the API server"
_OVER = "; the API server has no such pod any more, or says that it has ended"
#: A test that asks for the substrate.
EXAMPLE = """import pytest

from faults import {name}


@pytest.mark.chaos(substrate="kubernetes")
def test_{name}(chaos):
    chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])"""


async def pods_over(
    target: Target, processes: Sequence[Process], removal: Applied, more: str = ""
) -> Evidence:
    """Let the rank go on, and wait for the end of what was told to go: of the pods, and of the node's processes.

    ``more``: what is known beside that where the removal has taken effect, in words.
    """
    target.release()
    found(await target.seen(lambda: removal.shown() or None))
    seen = await all_gone(target, processes)
    return msgspec.structs.replace(seen, source=OVER_SOURCE, more=f"{_OVER}{more}")


def pods_unavailable(lacks: Callable[[KubernetesOptions], str] = lambda options: "") -> str:
    """Why no pod can be made with the options of the environment; "" if nothing is known against it.

    ``lacks``: what else is missing from them, and its remedy.
    """
    try:
        options = KubernetesOptions.from_environment(os.environ)
    except BadInput as error:
        return str(error)
    return options.unavailable() or lacks(options)


def require_grace_s(grace_s: int) -> None:
    """Refuse what the API server takes for no grace period. Raises BadInput."""
    if grace_s < 0 or grace_s != int(grace_s):
        raise BadInput("grace_s", grace_s, "use a whole number of seconds, 0 or more")


@dataclass(frozen=True, kw_only=True)
class PodFault(NodeFault):
    """Base of the faults that take the pod of the rank's node away."""

    evidence: ClassVar[str] = (
        "the connection to the first process of the pod has ended, and the API server has no such pod any more, "
        "or says that it has ended"
    )
    impact: ClassVar[str] = "the workers of the node are given up"
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    ends_node: ClassVar[bool] = True
    example: ClassVar[str] = EXAMPLE
    undo: ClassVar[str] = "nothing is left: another run has another pod"

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (type(self.removal),)

    @property
    def removal(self) -> Action:
        """What is done to the pod."""
        raise NotImplementedError

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | {"unreachable"}

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        yield await pods_over(target, processes, target.cluster.apply(target.node, self.removal))


@dataclass(frozen=True, kw_only=True)
class GracefulPodFault(PodFault):
    """Base of those that tell its processes to end before.

    Args:
        grace_s: they have so many whole seconds for it. A run with an elastic policy uses them to leave without a loss.
    """

    grace_s: int = 0

    impact: ClassVar[str] = (
        "the workers of the node are given up; with grace and an elastic policy they leave"
    )

    @property
    def evidence_s(self) -> float:
        return float(self.grace_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_grace_s(self.grace_s)


@dataclass(frozen=True, kw_only=True)
class KillContainer(PodFault):
    """Have all processes of the rank's container end at once, the first one last: a container that is killed."""

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = "the container of one node ends at once, and its pod with it"
    stands_for: ClassVar[str] = "containers that run out of memory, and runtimes that crash"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER, incidents.CPU_OOM)

    @property
    def removal(self) -> Action:
        return ContainerCrash()


@dataclass(frozen=True, kw_only=True)
class DeletePod(GracefulPodFault):
    """Delete the pod of the rank's node, as ``kubectl delete pod`` does."""

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = "the pod of one node is deleted, with all that was in it"
    stands_for: ClassVar[str] = "operators and controllers that delete pods"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER,)

    @property
    def removal(self) -> Action:
        return PodDeletion(self.grace_s)


@dataclass(frozen=True, kw_only=True)
class EvictPod(GracefulPodFault):
    """Have the pod of the rank's node evicted, as ``kubectl drain`` does."""

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = (
        "the pod of one node is evicted, unless a budget of disruptions forbids it"
    )
    stands_for: ClassVar[str] = "drains of machines for upgrades and repairs"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)

    @property
    def removal(self) -> Action:
        return PodEviction(self.grace_s)


@dataclass(frozen=True, kw_only=True)
class PreemptPod(PodFault):
    """Have the scheduler preempt the pod of the rank's node, for a pod of a higher priority that cannot be beside it.

    That pod asks for no resources, so no other pod is preempted for it; where the cluster has it ask for some, none is
    made, and the run is an error. The processes of the rank's pod have its grace
    period (``terminationGracePeriodSeconds`` of the template, 30 s) to end.

    Args:
        priority_class: that of the other pod.
    """

    priority_class: str = "system-cluster-critical"

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = "the scheduler takes the pod of one node away"
    evidence: ClassVar[str] = (
        "the connection to the first process of the pod has ended, the API server has no such pod any more, or says "
        "that it has ended, and the scheduler names the pod for which it has preempted that"
    )
    stands_for: ClassVar[str] = "jobs of a higher priority on a cluster that is shared"
    impact: ClassVar[str] = (
        "the workers of the node are given up; with an elastic policy they leave"
    )
    undo: ClassVar[str] = "the other pod ends at once, and is deleted"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER,)

    @property
    def removal(self) -> Action:
        return PodPreemption(self.priority_class)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not self.priority_class:
            raise BadInput(
                "priority_class", self.priority_class, "name a PriorityClass of the cluster"
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        with target.holding(target.cluster.apply(target.node, self.removal)) as removal:
            yield await pods_over(
                target, processes, removal, "; the scheduler says that it has preempted it for ours"
            )
