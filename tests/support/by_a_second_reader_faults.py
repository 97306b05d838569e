"""Faults of a user's own that do another thing than they say."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.osprocess import start_ticks
from chaoskit.substrate.undo import ContinueEntry
from faults import Kill, KillNode, NaN
from faults.base import Target
from faults.node import all_gone, signal_all

_IN_UPDATE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class NaNElsewhere(NaN):
    """Poisons the gradient of the last bias."""

    def inject(self, target: Target) -> None:
        target.pull("nan", parameter="3.bias", where=self.where, sticky=self.sticky)


@dataclass(frozen=True, kw_only=True)
class KillOtherNode(KillNode):
    """Kills the node of rank 2."""

    def inject(self, target: Target) -> None:
        node = target.places[2]
        target.struck_nodes = {node}
        target.notes |= {"node": node, "processes": target.cluster.node(node)}
        signal_all(target, target.notes["processes"], signal.SIGKILL)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return all_gone(target, target.notes["node"], target.notes["processes"])


@dataclass(frozen=True, kw_only=True)
class KillInUpdate(Kill):
    """Lets the rank contribute to the step, and strikes it in its update."""

    def inject(self, target: Target) -> None:
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        if target.seconds_since > _IN_UPDATE_S and "struck" not in target.notes:
            target.notes["struck"] = True
            target.signal(signal.SIGKILL)
        return False


@dataclass(frozen=True, kw_only=True)
class KillAndStop(Kill):
    """Kills its target, and stops a process beside the run, which nothing continues."""

    stopped: ClassVar[list[subprocess.Popen[bytes]]] = []

    def inject(self, target: Target) -> None:
        process = subprocess.Popen(["sleep", "300"])
        self.stopped.append(process)
        target.undo.plan(ContinueEntry(process.pid, start_ticks(process.pid)))
        os.kill(process.pid, signal.SIGSTOP)
        super().inject(target)

    def clean_up(self, target: Target) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class LazyKill(Kill):
    """Does nothing, and sees that its target is killed."""

    def inject(self, target: Target) -> None:
        target.pull("none")
