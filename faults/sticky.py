"""Nodes that are bad for good: what they start fails again and again."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit import osprocess
from chaoskit.errors import BadInput
from chaoskit.messages import HookReached, Lever, WorkerReady
from chaoskit.vocabulary import EXITED, LOAD
from faults import incidents
from faults.base import Fault, Target, require_message
from faults.incidents import IncidentKind


@dataclass(frozen=True, kw_only=True)
class _StickyFault(Fault):
    """Base of the faults that strike several workers of one node, one after the other."""

    times: int = 1

    family: ClassVar[str] = "node"
    of_runtime: ClassVar[bool] = True

    @property
    def from_outside(self) -> bool:
        return True

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.times < 1:
            raise BadInput("times", self.times, "use 1 or more")


@dataclass(frozen=True, kw_only=True)
class CrashLoop(_StickyFault):
    """SIGKILL the rank, and then every worker of its node as soon as that is ready.

    Args:
        times: how many are killed in all, the rank included.
    """

    times: int = 3

    effect: ClassVar[str] = "one node kills every worker, soon after its start"
    evidence: ClassVar[str] = "the killed workers are gone"
    stands_for: ClassVar[str] = "nodes that pass their start-up checks and fail under load"
    unlisted: ClassVar[str] = "the tables count single incidents, and not on how few nodes they gather"
    impact: ClassVar[str] = "each worker that had a rank is given up; its node collects strikes"

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset({EXITED})

    def inject(self, target: Target) -> None:
        target.notes["killed"] = []
        self._kill(target, target.worker, target.pid)
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        if not isinstance(message, WorkerReady) or message.node != target.node or message.worker in target.claims:
            return False
        if len(target.claims) < self.times:
            with contextlib.suppress(ProcessLookupError):
                self._kill(target, message.worker, message.endpoint.pid)
        return False

    def _kill(self, target: Target, worker: str, pid: int) -> None:
        ticks = osprocess.start_ticks(pid)
        target.claim(worker)
        try:
            target.cluster.signal(pid, signal.SIGKILL)
        except ProcessLookupError:
            del target.claims[worker]  # it ended by itself: that is not explained by this fault
            raise
        target.notes["killed"].append((pid, ticks))

    def observe(self, target: Target) -> str | None:
        killed = target.notes["killed"]
        gone = sum(osprocess.start_ticks(pid) != ticks or osprocess.is_ending(pid) for pid, ticks in killed)
        if not killed or gone < len(killed):
            return None
        return f"{gone} of {self.times} workers of {target.node} were killed and are gone"


@dataclass(frozen=True, kw_only=True)
class FailLoad(_StickyFault):
    """From its moment on, the next workers that the rank's node starts end while they load the job.

    It harms nobody who runs: something else must cause the start of replacements.

    Args:
        times: how many fail.
        message: of the exception.
    """

    message: str = "injected by chaoskit: the job cannot be loaded here"

    effect: ClassVar[str] = "replacements on one node end before they are ready"
    evidence: ClassVar[str] = "their agent reports that they ended with this exception"
    stands_for: ClassVar[str] = "spares that cannot start"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.DISK_FULL,
        incidents.MOUNT,
        incidents.HDFS,
        incidents.CONTAINER,
    )
    impact: ClassVar[str] = "none by itself: the redundancy that another fault has cost comes back later"
    example: ClassVar[str] = 'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}, Kill(rank=2, at_step=22)])'

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset({EXITED, "raised"})

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_message(self.message)

    def inject(self, target: Target) -> None:
        del target.claims[target.worker]  # the rank itself comes to no harm
        target.arm_node(LOAD)
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        if not isinstance(message, HookReached) or message.worker in target.releases:
            return False
        if message.fault != target.fault_id or message.phase != LOAD or len(target.claims) >= self.times:
            return False
        target.claim(message.worker)
        target.release(message.worker, Lever("raise", {"message": self.message}))
        return True

    def observe(self, target: Target) -> str | None:
        failed = [
            lost.worker
            for lost in target.losses.values()
            if lost.cause == "raised" and self.message in lost.detail and lost.worker in target.claims
        ]
        if not failed:
            return None
        return f"{len(failed)} of {self.times} workers ended while they loaded the job: {', '.join(failed)}"
