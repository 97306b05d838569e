"""Fault ``Exit``: a process exits by itself, as if its work were done.

-> runtime/injection/ending.py exits, in the worker.
-> coordinator/handlers/on_worker_lost.py: what the job does about the lost worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.processes.signals import ended
from chaoskit.faults.target import ProcessExit, Target
from chaoskit.vocabulary import EXITED


@dataclass(frozen=True, kw_only=True)
class Exit(Fault):
    """End the process of a rank by itself, in the middle of a step.

    There is no signal, no exception, no farewell.

    Args:
        status: exit status, 0 to 255. 0 is what a process says when its work is done: it must be
            missed all the same.
    """

    status: int = 0

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset({EXITED})
    effect: ClassVar[str] = (
        "the process of one rank exits in the middle of a step, by default with status 0"
    )
    evidence: ClassVar[str] = "its parent saw it exit with this status, and its rank was lost"
    stands_for: ClassVar[str] = "code of a worker, or a library in it, that calls exit"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SOFTWARE,)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 0 <= self.status <= 255:
            raise BadInput("status", self.status, "use an exit status from 0 to 255")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("exit", status=self.status)
        process_exit = await target.ended()
        is_expected = process_exit == ProcessExit("exited", f"status {self.status}")
        # every worker exits in the end, with status 0: only a lost one left too early
        if is_expected and target.lost is not None:
            yield ended(target, process_exit)
