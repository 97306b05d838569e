"""The loss of the process that decides membership."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Self

from chaoskit import osprocess
from chaoskit.messages import EndJob
from chaoskit.substrate.base import Process
from faults.base import Fault, Target

_ENDS_S = 0.05
_ANSWER_S = 0.25  # the question may have ended with another coordinator; who waits for a release asks again


@dataclass(frozen=True, kw_only=True)
class KillCoordinator(Fault):
    """SIGKILL the coordinator. ``rank`` only says who stands at the moment when that happens."""

    rank: int | str = "any"

    family: ClassVar[str] = "control"
    effect: ClassVar[str] = "nobody decides membership any more; training may go on, but can lose nobody"
    evidence: ClassVar[str] = "the coordinator's process is gone"
    stands_for: ClassVar[str] = "the loss of the one host that a job depends on: scheduler, rendezvous, rank 0's store"
    unlisted: ClassVar[str] = (
        "the tables count what stopped the training, and not what would have kept it from recovering"
    )
    impact: ClassVar[str] = "none by itself: training goes on, and the coordinator comes back from its record"
    sample: ClassVar[Mapping[str, Any]] = {"at_step": 20}
    of_runtime: ClassVar[bool] = True

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset()

    def expand(self, nodes: int, chance: Random) -> tuple[Self, ...]:
        """One, whatever the role: there is one coordinator."""
        return super().expand(nodes, chance)[:1]

    def inject(self, target: Target) -> None:
        del target.claims[target.worker]  # the rank itself comes to no harm
        if target.waiting:  # its release passes through the coordinator: the answer to what follows shows that it did
            target.pull("none")
            target.ping(1)
        else:
            self._kill(target)

    def again(self, target: Target, message: Any) -> bool:
        if isinstance(message, EndJob) and "process" in target.notes:
            target.notes["over"] = True
        released = 1 in target.pongs or target.seconds_since > _ANSWER_S
        if released and "process" not in target.notes and not isinstance(message, EndJob):
            self._kill(target)
        return False

    def _kill(self, target: Target) -> None:
        process = target.cluster.coordinator()
        if osprocess.is_ending(process.pid):
            return  # not by this fault: the next one will do, if there is one
        with contextlib.suppress(ProcessLookupError):
            target.cluster.signal_process(process, signal.SIGKILL)
            target.notes["process"] = process
            until_s = time.monotonic() + _ENDS_S
            while not osprocess.is_ending(process.pid) and time.monotonic() < until_s:
                time.sleep(0.0005)  # else a second one that is due now takes the same death for its own

    def observe(self, target: Target) -> str | None:
        process: Process | None = target.notes.get("process")
        if process is None or target.exited is not None or target.notes.get("over"):
            return None  # when the job is over every coordinator goes
        if osprocess.start_ticks(process.pid) == process.ticks and not osprocess.is_ending(process.pid):
            return None
        return f"the coordinator (pid {process.pid}) is gone"
