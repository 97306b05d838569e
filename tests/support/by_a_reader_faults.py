"""Faults of a user that act differently from what they claim."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

from faults import Kill
from faults.base import Fault
from faults.evidence import Evidence, ProcessEnded, ReadBack
from faults.processes.signals import killed
from faults.target import Target


def worker_of(target: Target, rank: int) -> Any:
    """Return the process of a rank on a node with one worker."""
    return [
        process
        for process in target.cluster.node(target.places[rank])
        if process.name.startswith(f"ck-{target.places[rank]}.")
    ][-1]


@dataclass(frozen=True, kw_only=True)
class KillOther(Kill):
    """Signal the process of rank 2, and claim that the fault's own target is gone."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        worker_of(target, 2).signal(signal.SIGKILL)
        target.release()
        yield ProcessEnded(
            subject=target.rank_process, source="nothing", how="killed", status="SIGKILL"
        )


@dataclass(frozen=True, kw_only=True)
class KillLate(Kill):
    """Let the rank go on, and strike it some steps later."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        await target.sleep(0.2)
        target.claim()
        target.signal(signal.SIGKILL)
        if (evidence := await killed(target, signal.SIGKILL)) is not None:
            yield evidence


@dataclass(frozen=True, kw_only=True)
class KillTwo(Kill):
    """Kill the target and rank 2, and claim both."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.claim(f"{target.places[2]}.0")
        worker_of(target, 2).signal(signal.SIGKILL)
        async for evidence in super().inject(target):
            yield evidence


@dataclass(frozen=True, kw_only=True)
class Nothing(Fault):
    """Do nothing, and yield no evidence."""

    family: ClassVar[str] = "process"

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield ReadBack(subject=target.rank_process, source="", value="")
