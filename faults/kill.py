"""A process that ends without warning."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.osprocess import is_ending
from faults.base import Fault, Target


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """Send a signal to the process of a rank; SIGKILL by default.

    Args:
        signum: any signal number. One that the process survives leaves the fault without evidence, and the run's
            verdict ``unknown``.
    """

    signum: int = signal.SIGKILL

    effect: ClassVar[str] = "the process of one rank ends at once, its memory and connections with it"
    evidence: ClassVar[str] = "the kernel shows the process exiting, a zombie or gone"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.signum not in signal.valid_signals():
            raise BadInput("signum", self.signum, "use a signal number such as signal.SIGKILL")

    def inject(self, target: Target) -> None:
        target.signal(self.signum)

    def observe(self, target: Target) -> str | None:
        if target.lost is not None and target.lost.cause in ("killed", "dumped"):
            return f"its parent: {target.lost.detail}"
        if is_ending(target.pid):
            return f"pid {target.pid} is exiting or gone, {target.seconds_since * 1000:.1f} ms after the signal"
        return None
