"""Nodes that are bad for good: what they start fails again and again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_message
from chaoskit.faults.evidence import Counted, Evidence, LossReported
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.processes import Process
from chaoskit.vocabulary import EXITED, LOAD
from chaoskit.wire.messages import AtHook, WorkerLost, WorkerReady


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
    unlisted: ClassVar[str] = (
        "the tables count single incidents, and not on how few nodes they gather"
    )
    impact: ClassVar[str] = "each worker that had a rank is given up; its node collects strikes"

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset({EXITED})

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ready, killed = target.listen(WorkerReady), [self._kill(target, target.worker, target.pid)]
        target.release()
        yield await self._all_gone(target, killed)
        async for message in ready:
            if (
                message.node == target.node
                and message.worker not in target.claims
                and len(target.claims) < self.times
            ):
                with contextlib.suppress(ProcessLookupError):
                    killed.append(self._kill(target, message.worker, message.endpoint.pid))
                    yield await self._all_gone(target, killed)

    def _kill(self, target: Target, worker: str, pid: int) -> Process:
        process = target.cluster.worker(target.node, pid)
        target.claim(worker)
        try:
            process.signal(signal.SIGKILL)
        except ProcessLookupError:
            target.unclaim(worker)  # it ended by itself: that is not explained by this fault
            raise
        return process

    async def _all_gone(self, target: Target, killed: Sequence[Process]) -> Counted:
        await target.seen(lambda: all(process.is_gone() for process in killed))
        told = f"{len(killed)} of {self.times} workers of {target.node} were killed and are gone"
        source = "the kernel's list of processes"
        return Counted(subject=target.whole_node, source=source, count=len(killed), seen=told)


@dataclass(frozen=True, kw_only=True)
class FailLoad(_StickyFault):
    """From its moment on, the next workers that the rank's node starts end while they load the job.

    It harms no worker that runs already: something else must cause the start of replacements.

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
    impact: ClassVar[str] = (
        "none by itself: the redundancy that another fault has cost comes back later"
    )
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}, Kill(rank=2, at_step=22)])'
    )

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset({EXITED, "raised"})

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_message(self.message)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # the rank itself comes to no harm
        heard = target.listen(AtHook, WorkerLost)
        target.arm(LOAD)
        target.release()
        async for message in heard:
            if isinstance(message, WorkerLost):
                if message.worker in target.claims and (failed := self._failed(target)):
                    told = f"{len(failed)} of {self.times} workers ended while they loaded the job: {', '.join(failed)}"
                    yield LossReported(
                        subject=target.whole_node, source="its agent", cause="raised", seen=told
                    )
            elif message.phase == LOAD and len(target.claims) < self.times:
                target.claim(message.worker)
                target.release_worker(message.worker, "raise", message=self.message)
            else:
                target.release_worker(message.worker, "none")

    def _failed(self, target: Target) -> list[str]:
        """The workers that ended with this exception."""
        losses = target.losses.values()
        return [
            lost.worker for lost in losses if lost.cause == "raised" and self.message in lost.detail
        ]
