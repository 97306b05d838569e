"""Fault ``ClockJump``: the wall clock of a process jumps.

-> runtime/injection/clock.py replaces the clock in the worker and compares it with the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.target import Target

_YEARS_S = 10 * 366 * 86400.0


@dataclass(frozen=True, kw_only=True)
class ClockJump(Fault):
    """Let the wall clock of one process jump.

    It changes ``time.time``, ``time.time_ns`` and ``datetime.now``, wherever a module has them by
    name. Nothing may be decided by it. The machine's clock is never touched, monotonic clocks
    neither.

    Args:
        seconds: length of the jump; below 0 for a jump back. At least 2, to exceed a slow reading.
    """

    seconds: float

    family: ClassVar[str] = "time"
    blameless: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    effect: ClassVar[str] = "the wall clock of one rank jumps forward or back"
    evidence: ClassVar[str] = (
        "the process's wall clock, compared with CLOCK_REALTIME as the kernel tells it"
    )
    stands_for: ClassVar[str] = "a step of NTP, or a virtual machine that was moved"
    unlisted: ClassVar[str] = (
        "it stops no run by itself; what it breaks is counted under what broke"
    )
    impact: ClassVar[str] = "none is wanted: nothing may be decided by the wall clock"
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "seconds": 3600.0}
    undo: ClassVar[str] = "the process alone has the other clock; it ends with it"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not math.isfinite(self.seconds) or not 2 <= abs(self.seconds) <= _YEARS_S:
            raise BadInput(
                "seconds",
                self.seconds,
                "use at least 2 seconds, forward or back, and at most ten years",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("clock", seconds=self.seconds)
        yield await target.read_back()
