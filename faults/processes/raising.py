"""Fault ``Raise``: the training code of a rank raises an exception.

-> runtime/injection/ending.py raises it, in the worker.
-> coordinator/membership/strikes.py: when the same exception on several ranks ends the job.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_message
from chaoskit.faults.evidence import Evidence, LossReported
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.vocabulary import FAILED_CAUSES


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """Raise an exception in the user's code of one rank.

    Args:
        message: text of the exception.
    """

    message: str = "injected by chaoskit"

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES
    effect: ClassVar[str] = (
        "the training code of one rank fails with an exception, and its process ends"
    )
    evidence: ClassVar[str] = "the process ended with this exception"
    stands_for: ClassVar[str] = "software bugs, and errors of the device that end the process"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.SOFTWARE,
        incidents.HBM,
        incidents.SRAM,
        incidents.CUDA_ERROR,
        incidents.GPU_MEMORY,
    )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_message(self.message)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("raise", message=self.message)
        lost = await target.heard(lambda: target.lost)
        if lost.cause == "raised" and self.message in lost.detail:
            words = f"the process ended: {lost.detail}"
            yield LossReported(
                subject=target.rank_process, source="its agent", cause=lost.cause, seen=words
            )
