"""The pod of the coordinator that goes: the coordinator comes back in another one, under another address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.faults.base import found
from chaoskit.faults.evidence import CoordinatorProcess, Evidence, ProcessEnded
from chaoskit.faults.kubernetes.pod import EXAMPLE, OVER_SOURCE, pods_unavailable
from chaoskit.faults.nodes.coordinator import CoordinatorFault
from chaoskit.faults.target import Target
from chaoskit.substrate.cluster.network import COORDINATOR
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.options import VARIABLE, KubernetesOptions
from chaoskit.substrate.kubernetes.pods.actions import PodDeletion


@dataclass(frozen=True, kw_only=True)
class DeleteCoordinatorPod(CoordinatorFault):
    """Delete the pod of the coordinator. ``rank`` only says which rank stands at the moment when that happens.

    It needs a driver: without one that pod holds the session, and goes with it.
    """

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
    impact: ClassVar[str] = (
        "none by itself: training goes on, and the next coordinator has a copy of that record"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE
    undo: ClassVar[str] = "nothing is left: the coordinator has another pod"
    needs_standby: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable(_lacks_driver)

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (PodDeletion,)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # the rank itself comes to no harm
        process = target.cluster.coordinator()
        removal = target.cluster.apply(COORDINATOR, PodDeletion(0))
        target.acts()
        target.release()
        found(await target.seen(lambda: (removal.shown() and not target.job_ended) or None))
        yield ProcessEnded(
            subject=CoordinatorProcess(process.pid), source=OVER_SOURCE, how="gone", status=""
        )


def _lacks_driver(options: KubernetesOptions) -> str:
    if options.has_driver or options.driven is not None:
        return ""
    return f"without a driver that pod holds the session: leave {VARIABLE}HARNESS out, or use pod"
