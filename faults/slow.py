"""A rank that is slower than the others, and healthy otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit import osprocess
from chaoskit.errors import BadInput
from chaoskit.substrate.cgroup import Cgroup, throttle, unavailable
from chaoskit.vocabulary import HUNG_CAUSES
from faults import incidents
from faults.base import Fault, Target
from faults.incidents import IncidentKind

HOWS = ("sleep", "quota", "duty")

_BURNER = "ck-burner"  # name of the thread that burns, by which it is found from outside
_BURNT_TICKS = 2  # clock ticks of 10 ms


@dataclass(frozen=True, kw_only=True)
class Straggle(Fault):
    """Make a rank slow for some steps. Within the limit for hangs nobody may be called hung for it.

    Args:
        how: ``sleep``: each phase of each shard begins late. ``quota``: the kernel gives the whole process only a share
            of a CPU (cgroup v1 or v2). ``duty``: a thread of the process takes a share of a CPU for itself.
        delay_ms: for ``sleep``, how late.
        cpu_fraction: for ``quota``, the share of one CPU that is left; for ``duty``, the share that is burnt.
        steps: how many steps it lasts.
    """

    how: str = "sleep"
    delay_ms: float = 20.0
    cpu_fraction: float = 0.5
    steps: int = 10

    family: ClassVar[str] = "time"
    effect: ClassVar[str] = "one rank is slow for some steps, and all wait for it"
    evidence: ClassVar[str] = (
        "the measured delay, the kernel's count of times that it was throttled, or the CPU time of the burning thread"
    )
    stands_for: ClassVar[str] = "overheated or crowded machines"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.THERMAL, incidents.CPU_OVERLOAD, incidents.SLOW)
    impact: ClassVar[str] = "none is wanted: steps take longer, and a rank that is blamed for it is a false alarm"
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    undo: ClassVar[str] = (
        "the control group is removed at the end; if the run is killed, by its guard; the rest ends by itself"
    )

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("cpu")
        return f"how='quota' only: {reason}" if reason else ""

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | {"slow"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")
        if self.how == "sleep" and not 0 < self.delay_ms < 1e6:
            raise BadInput("delay_ms", self.delay_ms, "use more than 0 milliseconds, and less than 1000 s")
        if self.how != "sleep" and not 0 < self.cpu_fraction <= 1:
            raise BadInput("cpu_fraction", self.cpu_fraction, "use a share of one CPU above 0, up to 1")
        if self.steps < 1:
            raise BadInput("steps", self.steps, "use 1 or more")
        if self.how == "quota" and (reason := unavailable("cpu")):
            raise BadInput("how", self.how, f"use 'sleep' or 'duty' on this machine: {reason}")

    def inject(self, target: Target) -> None:
        if self.how == "sleep":
            target.pull("delay", delay_ms=self.delay_ms, steps=self.steps)
        elif self.how == "duty":
            target.pull("burn", cpu_fraction=self.cpu_fraction, steps=self.steps, name=_BURNER)
        else:
            try:
                target.notes["group"] = throttle(target.pid, target.ticks, target.undo, self.cpu_fraction)
            finally:
                target.pull("none")  # whether or not the kernel took the limit: nobody may be left waiting

    def observe(self, target: Target) -> str | None:
        if self.how == "sleep":
            return target.read_back
        return _burnt(target) if self.how == "duty" else self._throttled(target)

    def _throttled(self, target: Target) -> str | None:
        """What the kernel counted, once the steps are over, or the process is gone."""
        group: Cgroup | None = target.notes.get("group")
        if group is None:
            return None
        over = target.exited is not None or target.lost is not None
        if not over:
            target.notes["throttled"] = group.throttled()
            if target.beat is None or target.beat[1].step < target.step + self.steps:
                return None
            group.limit_cpu(None)
        times, seconds = target.notes.get("throttled", (0, 0.0))
        return f"the kernel throttled {group.path.name} {times} times, for {seconds * 1000:.0f} ms" if times else None

    def clean_up(self, target: Target) -> bool:
        group: Cgroup | None = target.notes.get("group")
        return group is None or group.remove()


def _burnt(target: Target) -> str | None:
    """CPU time of the burning thread, as the kernel counts it."""
    for tid, name in osprocess.threads(target.pid).items():
        ticks = osprocess.cpu_ticks(target.pid, tid) if name == _BURNER else None
        if ticks is not None and ticks >= _BURNT_TICKS:
            return f"thread {tid} ({name}) of pid {target.pid} used {ticks * 10} ms of CPU"
    return None
