"""No pod can be made in the place of a lost one: there is no room for it, or its image is nowhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults.base import require_seconds
from chaoskit.faults.evidence import ApiServer, Counted, Evidence
from chaoskit.faults.kubernetes.pod import EXAMPLE, pods_unavailable
from chaoskit.faults.nodes.coordinator import ControlFault
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, Applied
from chaoskit.substrate.kubernetes.pods.actions import PodHindrance
from chaoskit.substrate.kubernetes.pods.pod_blocker import How


@dataclass(frozen=True, kw_only=True)
class PendingPods(ControlFault):
    """Base of the faults that keep pods from running which are made while they last.

    It shows when a node is lost and replaced meanwhile (``node_replacements``), by a pod that does not stand by yet.

    Args:
        lasts_s: so long; None for the rest of the run.
    """

    lasts_s: float | None = None

    how: ClassVar[How]
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 10}
    evidence: ClassVar[str] = (
        "the API server says so of a pod that was made in the place of a lost one"
    )
    impact: ClassVar[str] = "the world stays small, and is whole again when a pod can be made"
    undo: ClassVar[str] = (
        "the next attempt makes a pod as ever; the one that does not run is deleted"
    )
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    example: ClassVar[str] = EXAMPLE.replace("steps=60", "steps=60, node_replacements=1")

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (PodHindrance,)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.lasts_s is not None:
            require_seconds("lasts_s", self.lasts_s, above_0=True)

    def require(self, config: RunConfig) -> None:
        if not config.node_replacements:
            raise BadInput(
                "node_replacements",
                0,
                f"use 1 or more: else no pod is made that {self.kind} could meet",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # no rank comes to harm
        with target.holding(target.cluster.apply(target.node, PodHindrance(self.how))) as hindrance:
            target.release()
            if (
                seen := await target.seen(lambda: self._told(hindrance), limit_s=self.lasts_s)
            ) is not None:
                yield seen
            if self.lasts_s is None:
                await target.until_end()
            else:
                await target.sleep(self.lasts_s - target.seconds_since)
        target.lifted()

    def _told(self, hindrance: Applied) -> Counted | None:
        count = hindrance.shown()
        told = f"the API server says of {count} pods that they do not run: {self.effect}"
        return (
            Counted(subject=ApiServer(), source="the API server", count=count, seen=told)
            if count
            else None
        )


@dataclass(frozen=True, kw_only=True)
class NoRoom(PendingPods):
    """Have every pod that is made ask for more than any machine has: the scheduler finds no place for it."""

    how: ClassVar[How] = "room"
    effect: ClassVar[str] = "no machine has room for another pod"
    stands_for: ClassVar[str] = "clusters that are full, and autoscalers that do not come"


@dataclass(frozen=True, kw_only=True)
class BadImage(PendingPods):
    """Have every pod that is made name an image that is nowhere: its machine cannot pull it."""

    how: ClassVar[How] = "image"
    effect: ClassVar[str] = "the image of another pod cannot be pulled"
    stands_for: ClassVar[str] = "registries that are out, and tags that were taken away"
