"""Faults of a user that act differently from what they claim."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.process.linux import start_ticks
from chaoskit.substrate.undo import ContinueEntry
from faults import Kill, KillNode, NaN
from faults.evidence import Evidence
from faults.processes.signals import gone, killed, signal_all
from faults.target import Target

_IN_UPDATE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class NaNElsewhere(NaN):
    """Poison the gradient of the last bias."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("nan", parameter="3.bias", where=self.where, sticky=self.sticky)
        yield await target.read_back()


@dataclass(frozen=True, kw_only=True)
class KillOtherNode(KillNode):
    """Kill the node of rank 2."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        node = target.places[2]
        target.struck_nodes = {node}
        processes = target.cluster.node(node)
        signal_all(processes, signal.SIGKILL)
        target.release()
        yield await target.seen(lambda: gone(processes, node))


@dataclass(frozen=True, kw_only=True)
class KillInUpdate(Kill):
    """Let the rank contribute to the step, and strike it in its update."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        await target.sleep(_IN_UPDATE_S)
        target.signal(signal.SIGKILL)
        if (evidence := await killed(target, signal.SIGKILL)) is not None:
            yield evidence


@dataclass(frozen=True, kw_only=True)
class KillAndStop(Kill):
    """Kill the target, and stop a process outside the run; nothing continues it."""

    stopped: ClassVar[list[subprocess.Popen[bytes]]] = []

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        self._stop_one(target)
        async for evidence in super().inject(target):
            yield evidence

    def _stop_one(self, target: Target) -> None:
        process = subprocess.Popen(["sleep", "300"])
        self.stopped.append(process)
        target.undo.plan(ContinueEntry(process.pid, start_ticks(process.pid)))
        os.kill(process.pid, signal.SIGSTOP)


@dataclass(frozen=True, kw_only=True)
class LazyKill(Kill):
    """Do nothing, and report that the target was killed."""

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.release()
        if (evidence := await killed(target, signal.SIGKILL)) is not None:
            yield evidence
