"""Fault ``KillCoordinator``: the process that decides membership is lost.

-> substrate/cluster/supervised.py has the supervisor start the next one.
-> coordinator/handlers/on_restart.py: how that continues the run from the log of the last one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import CoordinatorProcess, Evidence, ProcessEnded
from chaoskit.faults.target import Target
from chaoskit.substrate.core.processes import Process

#: Reason why no table counts faults of the control plane.
CONTROL_UNLISTED = (
    "the tables count what stopped the training, and not what would have kept it from recovering"
)
_ENDS_S = 0.05  # longest wait for the end of the killed process
_LOOK_S = 0.01  # interval of looks for the coordinator that takes over


@dataclass(frozen=True, kw_only=True)
class KillCoordinator(Fault):
    """SIGKILL the coordinator.

    ``rank`` only names the rank that stops at that moment.
    """

    rank: int | str = "any"

    family: ClassVar[str] = "control"
    has_one_target: ClassVar[bool] = True
    ends_coordinator: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset()
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"
    effect: ClassVar[str] = (
        "no process decides membership any more; training may go on, but can lose no rank"
    )
    evidence: ClassVar[str] = "the coordinator's process is gone"
    stands_for: ClassVar[str] = (
        "the loss of the one host that a job depends on: scheduler, rendezvous, rank 0's store"
    )
    unlisted: ClassVar[str] = CONTROL_UNLISTED
    impact: ClassVar[str] = (
        "none by itself: training goes on, and the coordinator comes back from its record"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # the rank itself is not struck
        killed = self._kill(target)
        target.release()
        while killed is None:
            await target.sleep(_LOOK_S)
            killed = self._kill(target)
        # every coordinator ends with its job
        await target.seen(lambda: killed.is_gone() and not target.job_ended)
        yield ProcessEnded(
            subject=CoordinatorProcess(killed.pid),
            source="the kernel's list of processes",
            how="gone",
            status="",
        )

    def _kill(self, target: Target) -> Process | None:
        """Kill the present coordinator, wait up to 50 ms for its end, and return its process.

        Return None if it or the job has ended by itself; the caller then tries its successor.
        """
        process = target.cluster.coordinator()
        if target.job_ended or process.is_gone():
            return None
        with contextlib.suppress(ProcessLookupError):
            process.signal(signal.SIGKILL)
            target.acts()
            until_s = time.monotonic() + _ENDS_S
            while not process.is_gone() and time.monotonic() < until_s:
                time.sleep(0.0005)  # a second fault that is due now must not count the same death
            return process
        return None
