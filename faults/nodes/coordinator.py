"""The loss of the process that decides membership."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Literal, Self

from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import CoordinatorProcess, Evidence, ProcessEnded
from chaoskit.faults.target import Target
from chaoskit.substrate.core.processes import Process

_ENDS_S = 0.05
_LOOK_S = 0.01  # for the coordinator that takes over


@dataclass(frozen=True, kw_only=True)
class ControlFault(Fault):
    """Base of the faults that strike no rank. ``rank`` says which rank stands at that moment, and no more."""

    rank: int | str = "any"

    family: ClassVar[str] = "control"
    unlisted: ClassVar[str] = (
        "the tables count what stopped the training, and not what would have kept it from recovering"
    )
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    of_runtime: ClassVar[bool] = True
    cost: ClassVar[Literal["nothing", "process", "node"]] = "nothing"

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset()

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        """One, whatever the role: what is struck is there once."""
        return super().expand(nodes, chance)[:1]


@dataclass(frozen=True, kw_only=True)
class CoordinatorFault(ControlFault):
    """Base of the faults that end the coordinator."""


@dataclass(frozen=True, kw_only=True)
class KillCoordinator(CoordinatorFault):
    """SIGKILL the coordinator. ``rank`` only says which rank stands at the moment when that happens."""

    effect: ClassVar[str] = (
        "no process decides membership any more; training may go on, but can lose no rank"
    )
    evidence: ClassVar[str] = "the coordinator's process is gone"
    stands_for: ClassVar[str] = (
        "the loss of the one host that a job depends on: scheduler, rendezvous, rank 0's store"
    )
    impact: ClassVar[str] = (
        "none by itself: training goes on, and the coordinator comes back from its record"
    )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # the rank itself comes to no harm
        killed = self._kill(target)
        target.release()
        while killed is None:
            await target.sleep(_LOOK_S)
            killed = self._kill(target)
        await target.seen(
            lambda: killed.is_gone() and not target.job_ended
        )  # when the job is over every coordinator goes
        yield ProcessEnded(
            subject=CoordinatorProcess(killed.pid),
            source="the kernel's list of processes",
            how="gone",
            status="",
        )

    def _kill(self, target: Target) -> Process | None:
        """Kill the coordinator that is there; None where it ends by itself: the next one will do, if there is one."""
        process = target.cluster.coordinator()
        if target.job_ended or process.is_gone():
            return None
        with contextlib.suppress(ProcessLookupError):
            process.signal(signal.SIGKILL)
            target.acts()
            until_s = time.monotonic() + _ENDS_S
            while not process.is_gone() and time.monotonic() < until_s:
                time.sleep(
                    0.0005
                )  # else a second one that is due now takes the same death for its own
            return process
        return None
