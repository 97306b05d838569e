"""Code that fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from faults.base import Fault, Target


@dataclass(frozen=True, kw_only=True)
class Raise(Fault):
    """Raise an exception in the user's code of one rank."""

    message: str = "injected by chaoskit"

    effect: ClassVar[str] = "the training code of one rank fails with an exception, and its process ends"
    evidence: ClassVar[str] = "the process ended with this exception"
    stands_for: ClassVar[str] = "software bugs (Llama 3: 12.9 %) and CUDA errors (ByteRobust: 36.1 %)"

    def inject(self, target: Target) -> None:
        target.pull("raise", message=self.message)

    def observe(self, target: Target) -> str | None:
        if target.lost is not None and target.lost.cause == "raised" and self.message in target.lost.detail:
            return f"the process ended: {target.lost.detail}"
        return None
