"""Fault ``Kill``: a process ends by a signal.

-> processes/signals.py: the evidence that it ended by this signal.
-> coordinator/handlers/on_worker_lost.py: what the job does about the lost worker.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.processes.signals import killed
from chaoskit.faults.target import Target
from chaoskit.vocabulary import EXITED, FAILED_CAUSES, HUNG_CAUSES

_STOPPING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """Send a signal to the process of a rank; SIGKILL by default.

    Args:
        signum: any signal number. One that the process survives leaves the fault without evidence,
            and the run's verdict ``unknown``.
    """

    signum: int = signal.SIGKILL

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "the process of one rank ends at once, its memory and connections with it"
    )
    evidence: ClassVar[str] = "its parent saw it end by this signal"
    stands_for: ClassVar[str] = "faulty GPUs, and other crashes of one process"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.GPU, incidents.GPU_LOST)

    @property
    def leads_to(self) -> frozenset[str]:
        if self.signum == signal.SIGKILL:
            return frozenset({EXITED})
        if self.signum == signal.SIGSTOP:
            return HUNG_CAUSES | {"stopped"}
        # the job may have a handler for the signal
        return FAILED_CAUSES | ({"stopped"} if self.signum in _STOPPING else set())

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.signum not in signal.valid_signals():
            raise BadInput("signum", self.signum, "use a signal number such as signal.SIGKILL")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.signal(self.signum)
        target.release()  # a process that survives the signal goes on
        if (evidence := await killed(target, self.signum)) is not None:
            yield evidence
