"""Faults ``NoRoom`` and ``BadImage``: no pod can replace a lost one.

Either shows when a node is lost and replaced meanwhile (``node_replacements``), by a pod that does
not stand by yet.

-> substrate/kubernetes/pods/pod_blocker.py changes the new pods and counts those that do not run.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import ApiServer, Counted, Evidence
from chaoskit.faults.kubernetes.pod import EXAMPLE, pods_unavailable
from chaoskit.faults.nodes.coordinator import CONTROL_UNLISTED
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action
from chaoskit.substrate.kubernetes.pods.actions import PodHindrance

_EVIDENCE = "the API server says so of a pod that was made in the place of a lost one"
_IMPACT = "the world stays small, and is whole again when a pod can be made"
_UNDO = "the next attempt makes a pod as ever; the one that does not run is deleted"
_EXAMPLE = EXAMPLE.replace("steps=60", "steps=60, node_replacements=1")


@dataclass(frozen=True, kw_only=True)
class NoRoom(Fault):
    """Let every new pod ask for more than any machine has.

    The scheduler finds no place for it.

    Args:
        lasts_s: seconds that it lasts; None for the rest of the run.
    """

    rank: int | str = "any"
    lasts_s: float | None = None

    family: ClassVar[str] = "control"
    has_one_target: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[type[Action], ...]] = (PodHindrance,)
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"
    effect: ClassVar[str] = "no machine has room for another pod"
    evidence: ClassVar[str] = _EVIDENCE
    stands_for: ClassVar[str] = "clusters that are full, and autoscalers that do not come"
    unlisted: ClassVar[str] = CONTROL_UNLISTED
    impact: ClassVar[str] = _IMPACT
    undo: ClassVar[str] = _UNDO
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 10}
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _require_duration(self.lasts_s)

    def require(self, config: RunConfig) -> None:
        _require_replacements(self, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        return _hinder_pods(target, PodHindrance("room"), self.lasts_s, self.effect)


@dataclass(frozen=True, kw_only=True)
class BadImage(Fault):
    """Let every new pod name an image that does not exist.

    Its machine cannot pull it.

    Args:
        lasts_s: seconds that it lasts; None for the rest of the run.
    """

    rank: int | str = "any"
    lasts_s: float | None = None

    family: ClassVar[str] = "control"
    has_one_target: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[tuple[type[Action], ...]] = (PodHindrance,)
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"
    effect: ClassVar[str] = "the image of another pod cannot be pulled"
    evidence: ClassVar[str] = _EVIDENCE
    stands_for: ClassVar[str] = "registries that are out, and tags that were taken away"
    unlisted: ClassVar[str] = CONTROL_UNLISTED
    impact: ClassVar[str] = _IMPACT
    undo: ClassVar[str] = _UNDO
    substrates: ClassVar[tuple[str, ...]] = ("kubernetes",)
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 10}
    example: ClassVar[str] = _EXAMPLE

    @classmethod
    def unavailable(cls) -> str:
        return pods_unavailable()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _require_duration(self.lasts_s)

    def require(self, config: RunConfig) -> None:
        _require_replacements(self, config)

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        return _hinder_pods(target, PodHindrance("image"), self.lasts_s, self.effect)


def _require_duration(lasts_s: float | None) -> None:
    if lasts_s is not None:
        require_seconds("lasts_s", lasts_s, above_0=True)


def _require_replacements(fault: Fault, config: RunConfig) -> None:
    """Raise BadInput if the run replaces no nodes: then no new pod is created."""
    if not config.node_replacements:
        raise BadInput(
            "node_replacements",
            0,
            f"use 1 or more: otherwise no pod is created that {fault.kind} can affect",
        )


async def _hinder_pods(
    target: Target, action: PodHindrance, lasts_s: float | None, effect: str
) -> AsyncGenerator[Evidence]:
    """Keep new pods from running, and yield evidence when the API server reports one.

    ``effect`` is the reason in words. The evidence never comes if no pod is made in the time.
    """
    target.unclaim()  # no rank is struck
    with target.holding(target.cluster.apply(target.node, action)) as blocker:
        target.release()

        def look() -> Counted | None:
            count = blocker.shown()
            words = f"the API server says of {count} pods that they do not run: {effect}"
            return (
                Counted(subject=ApiServer(), source="the API server", count=count, seen=words)
                if count
                else None
            )

        if (evidence := await target.seen(look, limit_s=lasts_s)) is not None:
            yield evidence
        if lasts_s is None:
            await target.until_end()
        else:
            await target.sleep(lasts_s - target.seconds_since)
    target.lifted()
