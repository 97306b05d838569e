"""Faults of a user's own that do another thing than they say."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, ClassVar

from faults import Kill
from faults.base import Fault, Target


def worker_of(target: Target, rank: int) -> Any:
    """The process that has a rank, on a node with one worker."""
    return [
        one for one in target.cluster.node(target.places[rank]) if one.name.startswith(f"ck-{target.places[rank]}.")
    ][-1]


@dataclass(frozen=True, kw_only=True)
class KillOther(Kill):
    """Signals the process of rank 2, and says that its own target is gone."""

    def inject(self, target: Target) -> None:
        target.cluster.signal_process(worker_of(target, 2), signal.SIGKILL)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return f"pid {target.pid} was killed by SIGKILL"


@dataclass(frozen=True, kw_only=True)
class KillLate(Kill):
    """Lets the rank go on, and strikes it some steps later."""

    def inject(self, target: Target) -> None:
        target.pull("none")

    def again(self, target: Target, message: Any) -> bool:
        if target.seconds_since > 0.2 and "struck" not in target.notes:
            target.notes["struck"] = True
            target.claim(target.worker)
            target.signal(signal.SIGKILL)
        return False


@dataclass(frozen=True, kw_only=True)
class KillTwo(Kill):
    """Kills its target, and rank 2 with it, and claims both."""

    def inject(self, target: Target) -> None:
        target.claim(f"{target.places[2]}.0")
        target.cluster.signal_process(worker_of(target, 2), signal.SIGKILL)
        super().inject(target)


@dataclass(frozen=True, kw_only=True)
class Nothing(Fault):
    """Does nothing, and says nothing."""

    family: ClassVar[str] = "process"

    def inject(self, target: Target) -> None:
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return ""
