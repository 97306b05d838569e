"""The loss of the process that decides membership."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import ClassVar

from chaoskit import osprocess
from chaoskit.substrate.base import Process
from faults.base import Fault, Target


@dataclass(frozen=True, kw_only=True)
class KillCoordinator(Fault):
    """SIGKILL the coordinator. ``rank`` only says who stands at the moment when that happens."""

    rank: int | str = "any"

    effect: ClassVar[str] = "nobody decides membership any more; training may go on, but can lose nobody"
    evidence: ClassVar[str] = "the coordinator's process is gone"
    stands_for: ClassVar[str] = "the loss of the one host that a job depends on: scheduler, rendezvous, rank 0's store"

    @property
    def from_outside(self) -> bool:
        return True

    def inject(self, target: Target) -> None:
        target.notes["process"] = target.cluster.coordinator()
        target.cluster.signal_process(target.notes["process"], signal.SIGKILL)
        with contextlib.suppress(OSError):  # nobody is there to pass it on: the rank will ask again
            target.pull("none")

    def observe(self, target: Target) -> str | None:
        process: Process = target.notes["process"]
        if osprocess.start_ticks(process.pid) == process.ticks and not osprocess.is_ending(process.pid):
            return None
        return f"the coordinator (pid {process.pid}) is gone"
