"""Faults of a user's own that do another thing than they say."""

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
    """The process that has a rank, on a node with one worker."""
    return [
        one
        for one in target.cluster.node(target.places[rank])
        if one.name.startswith(f"ck-{target.places[rank]}.")
    ][-1]


@dataclass(frozen=True, kw_only=True)
class KillOther(Kill):
    """Signals the process of rank 2, and says that its own target is gone."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        worker_of(target, 2).signal(signal.SIGKILL)
        target.release()
        yield ProcessEnded(
            subject=target.rank_process, source="nothing", how="killed", status="SIGKILL"
        )


@dataclass(frozen=True, kw_only=True)
class KillLate(Kill):
    """Lets the rank go on, and strikes it some steps later."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        await target.sleep(0.2)
        target.claim()
        target.signal(signal.SIGKILL)
        if (evidence := await killed(target, signal.SIGKILL)) is not None:
            yield evidence


@dataclass(frozen=True, kw_only=True)
class KillTwo(Kill):
    """Kills its target, and rank 2 with it, and claims both."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.claim(f"{target.places[2]}.0")
        worker_of(target, 2).signal(signal.SIGKILL)
        async for evidence in super().inject(target):
            yield evidence


@dataclass(frozen=True, kw_only=True)
class Nothing(Fault):
    """Does nothing, and says nothing."""

    family: ClassVar[str] = "process"

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        yield ReadBack(subject=target.rank_process, source="", value="")
