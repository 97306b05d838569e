"""Fault ``DeleteCoordinatorPod``: the coordinator comes back in another pod, at another address.

-> substrate/kubernetes/substrate.py: how the next coordinator gets a pod and the copy of the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import CoordinatorProcess, Evidence, ProcessEnded
from chaoskit.faults.kubernetes.pod import EXAMPLE, OVER_SOURCE, pods_unavailable
from chaoskit.faults.nodes.coordinator import CONTROL_UNLISTED
from chaoskit.faults.target import Target
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import PodDeletion


@dataclass(frozen=True, kw_only=True)
class DeleteCoordinatorPod(Fault):
    """Delete the pod of the coordinator.

    ``rank`` only names the rank that stops at that moment. It needs a driver: without one that pod
    holds the session, and is lost with it.
    """

    rank: int | str = "any"

    family: ClassVar[str] = "control"
    has_one_target: ClassVar[bool] = True
    ends_coordinator: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[type[Action], ...]] = (PodDeletion,)
    needs_standby: ClassVar[bool] = True
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"
    effect: ClassVar[str] = (
        "no process decides membership any more, and its record is gone with the pod"
    )
    evidence: ClassVar[str] = (
        "the connection to the first process of the pod has ended, and the API server has no such pod any more, "
        "or says that it has ended"
    )
    stands_for: ClassVar[str] = (
        "the loss of the one pod that a job depends on: launcher, rendezvous, rank 0's store"
    )
    unlisted: ClassVar[str] = CONTROL_UNLISTED
    impact: ClassVar[str] = (
        "none by itself: training goes on, and the next coordinator has a copy of that record"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    undo: ClassVar[str] = "nothing is left: the coordinator has another pod"

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_driver)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # the rank itself is not struck
        process = target.cluster.coordinator()
        removal = target.cluster.apply(COORDINATOR, PodDeletion(0))
        target.acts()
        target.release()
        await target.seen(lambda: (removal.shown() and not target.job_ended) or None)
        yield ProcessEnded(
            subject=CoordinatorProcess(process.pid), source=OVER_SOURCE, how="gone", status=""
        )


def _lacks_driver(options: KubernetesOptions) -> str:
    """Return the remedy if the run has no driver; "" if it has one."""
    if options.has_driver or options.driven is not None:
        return ""
    return f"without a driver that pod holds the session: leave {VARIABLE}HARNESS out, or use pod"
