"""Faults of the pod of a node: the API server acts, and the end of its processes is evidence.

-> substrate/kubernetes/backends.py sends the requests to the API server or the supervisor.
-> substrate/kubernetes/pods/pods.py: how another pod takes the place of a lost one.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NODE_LOST_CAUSES
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
_EVIDENCE = (
    "the connection to the first process of the pod has ended, and the API server has no such pod any more, "
    "or says that it has ended"
)
# Impact of faults that let the processes of a pod end by themselves.
_GRACE_IMPACT = "the workers of the node are given up; with grace and an elastic policy they leave"
_UNDO = "nothing is left: another run has another pod"
_OVER = "; the API server has no such pod any more, or says that it has ended"
#: Example for the catalogue: a test that asks for the substrate.
EXAMPLE = """import pytest

from faults import {name}


@pytest.mark.chaos(substrate="kubernetes")
def test_{name}(chaos):
    chaos.run("gpt", nodes=4, steps=60, faults=[{fault}])"""


async def _remove_pod(target: Target, removal: Action) -> Evidence:
    """Remove the pod of the target's node, release the rank, and return evidence of the end."""
    processes = look_up(target)
    return await pods_over(target, processes, target.cluster.apply(target.node, removal))


async def pods_over(
    target: Target, processes: Sequence[Process], removal: Applied, more: str = ""
) -> Evidence:
    """Release the rank, wait until the removed pods have ended, and return evidence of that.

    It does not return if the run ends first.

    Args:
        processes: processes of the node before the act, which must be gone, too.
        removal: the applied action.
        more: text that follows in the words of the evidence.
    """
    target.release()
    await target.seen(lambda: removal.shown() or None)
    evidence = await all_gone(target, processes)
    return msgspec.structs.replace(evidence, source=OVER_SOURCE, more=f"{_OVER}{more}")


def pods_unavailable(lacks: Callable[[KubernetesOptions], str] = lambda options: "") -> str:
    """Return the reason why no pod can be made with the options of the environment; "" if it can.

    ``lacks`` returns another option that is missing, with its remedy.
    """
    try:
        options = KubernetesOptions.from_environment(os.environ)
    except BadInput as error:
        return str(error)
    return options.unavailable() or lacks(options)


def require_grace_s(grace_s: int) -> None:
    """Raise BadInput unless the API server accepts the grace period."""
    if grace_s < 0 or grace_s != int(grace_s):
        raise BadInput("grace_s", grace_s, "use a whole number of seconds, 0 or more")


@dataclass(frozen=True, kw_only=True)
class KillContainer(Fault):
    """End all processes of the rank's container at once, the first one last.

    It looks like a container that is killed.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (ContainerCrash,)
    effect: ClassVar[str] = "the container of one node ends at once, and its pod with it"
    evidence: ClassVar[str] = _EVIDENCE
    stands_for: ClassVar[str] = "containers that run out of memory, and runtimes that crash"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER, incidents.CPU_OOM)
    impact: ClassVar[str] = "the workers of the node are given up"
    undo: ClassVar[str] = _UNDO
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        yield await _remove_pod(target, ContainerCrash())


@dataclass(frozen=True, kw_only=True)
class DeletePod(Fault):
    """Delete the pod of the rank's node, as ``kubectl delete pod`` does.

    Args:
        grace_s: whole seconds that its processes have to end by themselves. A run with an elastic policy uses them to
            leave without a loss.
    """

    grace_s: int = 0

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (PodDeletion,)
    effect: ClassVar[str] = "the pod of one node is deleted, with all that was in it"
    evidence: ClassVar[str] = _EVIDENCE
    stands_for: ClassVar[str] = "operators and controllers that delete pods"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER,)
    impact: ClassVar[str] = _GRACE_IMPACT
    undo: ClassVar[str] = _UNDO
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    @property
    def evidence_s(self) -> float:
        return float(self.grace_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_grace_s(self.grace_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        yield await _remove_pod(target, PodDeletion(self.grace_s))


@dataclass(frozen=True, kw_only=True)
class EvictPod(Fault):
    """Evict the pod of the rank's node, as ``kubectl drain`` does.

    Args:
        grace_s: whole seconds that its processes have to end by themselves. A run with an elastic policy uses them to
            leave without a loss.
    """

    grace_s: int = 0

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (PodEviction,)
    effect: ClassVar[str] = (
        "the pod of one node is evicted, unless a budget of disruptions forbids it"
    )
    evidence: ClassVar[str] = _EVIDENCE
    stands_for: ClassVar[str] = "drains of machines for upgrades and repairs"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = _GRACE_IMPACT
    undo: ClassVar[str] = _UNDO
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    @property
    def evidence_s(self) -> float:
        return float(self.grace_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_grace_s(self.grace_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        yield await _remove_pod(target, PodEviction(self.grace_s))


@dataclass(frozen=True, kw_only=True)
class PreemptPod(Fault):
    """Let the scheduler preempt the pod of the rank's node, for a pod of a higher priority.

    That pod cannot run beside it. It asks for no resources, so no other pod is preempted for it. If
    the cluster makes it ask for some, none is made, and the run is an error. The processes of the
    rank's pod have its grace period (``terminationGracePeriodSeconds`` of the template, 30 s) to
    end.

    Args:
        priority_class: class of the other pod.
    """

    priority_class: str = "system-cluster-critical"

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | {"unreachable"}
    needs: ClassVar[tuple[type[Action], ...]] = (PodPreemption,)
    effect: ClassVar[str] = "the scheduler takes the pod of one node away"
    evidence: ClassVar[str] = (
        "the connection to the first process of the pod has ended, the API server has no such pod any more, or says "
        "that it has ended, and the scheduler names the pod for which it has preempted that"
    )
    stands_for: ClassVar[str] = "jobs of a higher priority on a cluster that is shared"
    impact: ClassVar[str] = (
        "the workers of the node are given up; with an elastic policy they leave"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CONTAINER,)
    undo: ClassVar[str] = "the other pod ends at once, and is deleted"
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not self.priority_class:
            raise BadInput(
                "priority_class", self.priority_class, "name a PriorityClass of the cluster"
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        preemption = target.cluster.apply(target.node, PodPreemption(self.priority_class))
        with target.holding(preemption) as removal:
            yield await pods_over(
                target, processes, removal, "; the scheduler says that it has preempted it for ours"
            )
