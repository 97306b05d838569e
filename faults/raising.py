"""Code that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chaoskit.vocabulary import FAILED_CAUSES
from faults import incidents
from faults.base import Fault, Target, require_message
from faults.incidents import IncidentKind


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """Raise an exception in the user's code of one rank.

    Args:
        message: of the exception.
    """

    message: str = "injected by chaoskit"

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = "the training code of one rank fails with an exception, and its process ends"
    evidence: ClassVar[str] = "the process ended with this exception"
    stands_for: ClassVar[str] = "software bugs, and errors of the device that end the process"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.SOFTWARE,
        incidents.HBM,
        incidents.SRAM,
        incidents.CUDA_ERROR,
        incidents.GPU_MEMORY,
    )

    @property
    def leads_to(self) -> frozenset[str]:
        return FAILED_CAUSES

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_message(self.message)

    def inject(self, target: Target) -> None:
        target.pull("raise", message=self.message)

    def observe(self, target: Target) -> str | None:
        if target.lost is not None and target.lost.cause == "raised" and self.message in target.lost.detail:
            return f"the process ended: {target.lost.detail}"
        return None
