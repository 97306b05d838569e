"""Faults ``CrashLoop`` and ``FailLoad``: the workers of one node fail again and again.

-> coordinator/membership/strikes.py: after how many losses a node gets no further worker.
-> experiment/injection/channel.py stops new workers at a phase; runtime/injection/ending.py raises.
"""

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
class CrashLoop(Fault):
    """SIGKILL the rank, and then every worker of its node as soon as that is ready.

    Args:
        times: number of workers that are killed in all, the rank included.
    """

    times: int = 3

    family: ClassVar[str] = "node"
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset({EXITED})
    effect: ClassVar[str] = "one node kills every worker, soon after its start"
    evidence: ClassVar[str] = "the killed workers are gone"
    stands_for: ClassVar[str] = "nodes that pass their start-up checks and fail under load"
    unlisted: ClassVar[str] = (
        "the tables count single incidents, and not on how few nodes they gather"
    )
    impact: ClassVar[str] = "each worker that had a rank is given up; its node collects strikes"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _require_times(self.times)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        ready_messages = target.listen(WorkerReady)
        killed = [self._kill(target, target.worker, target.pid)]
        target.release()
        yield await self._all_gone(target, killed)
        async for message in ready_messages:
            if (
                message.node == target.node
                and message.worker not in target.claims
                and len(target.claims) < self.times
            ):
                with contextlib.suppress(ProcessLookupError):
                    killed.append(self._kill(target, message.worker, message.endpoint.pid))
                    yield await self._all_gone(target, killed)

    def _kill(self, target: Target, worker: str, pid: int) -> Process:
        """Claim and kill a worker of the node, and return its process.

        Raises:
            ProcessLookupError: if it has ended by itself; the claim is withdrawn.
        """
        process = target.cluster.worker(target.node, pid)
        target.claim(worker)
        try:
            process.signal(signal.SIGKILL)
        except ProcessLookupError:
            target.unclaim(worker)  # it ended by itself, which this fault does not explain
            raise
        return process

    async def _all_gone(self, target: Target, killed: Sequence[Process]) -> Counted:
        """Wait until all killed processes are gone, and return their number as evidence.

        It does not return if the run ends first.
        """
        await target.seen(lambda: all(process.is_gone() for process in killed))
        words = f"{len(killed)} of {self.times} workers of {target.node} were killed and are gone"
        source = "the kernel's list of processes"
        return Counted(subject=target.whole_node, source=source, count=len(killed), seen=words)


@dataclass(frozen=True, kw_only=True)
class FailLoad(Fault):
    """Let the next workers that the rank's node starts end while they load the job.

    It harms no worker that runs already: something else must cause the start of replacements.

    Args:
        times: number of workers that fail.
        message: text of the exception.
    """

    times: int = 1
    message: str = "injected by chaoskit: the job cannot be loaded here"

    family: ClassVar[str] = "node"
    of_runtime: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = frozenset({EXITED, "raised"})
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

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        _require_times(self.times)
        require_message(self.message)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.unclaim()  # only replacements are struck
        messages = target.listen(AtHook, WorkerLost)
        target.arm(LOAD)
        target.release()
        async for message in messages:
            if isinstance(message, WorkerLost):
                if message.worker in target.claims and (failed := self._failed(target)):
                    words = f"{len(failed)} of {self.times} workers ended while they loaded the job: {', '.join(failed)}"
                    yield LossReported(
                        subject=target.whole_node, source="its agent", cause="raised", seen=words
                    )
            elif message.phase == LOAD and len(target.claims) < self.times:
                target.claim(message.worker)
                target.release_worker(message.worker, "raise", message=self.message)
            else:
                target.release_worker(message.worker, "none")

    def _failed(self, target: Target) -> list[str]:
        """Return the workers that ended with the exception of this fault."""
        losses = target.losses.values()
        return [
            lost.worker for lost in losses if lost.cause == "raised" and self.message in lost.detail
        ]


def _require_times(times: int) -> None:
    """Raise BadInput unless at least one worker is struck."""
    if times < 1:
        raise BadInput("times", times, "use 1 or more")
