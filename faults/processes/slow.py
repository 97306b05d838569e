"""Fault ``Straggle``: a healthy rank is slower than the others.

-> runtime/injection/slowness.py sleeps or burns CPU in the worker; substrate/limits/holds.py sets
the quota.
-> coordinator/detectors/workload.py: what the job does about a slow rank.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Counted, Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, CapProcessCpu
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.vocabulary import HUNG_CAUSES

HOWS = ("sleep", "quota", "duty")

_BURNER = "ck-burner"  # name of the burning thread, which identifies it from outside
_BURNT_TICKS = 2  # clock ticks of 10 ms


@dataclass(frozen=True, kw_only=True)
class Straggle(Fault):
    """Make a rank slow for some steps.

    Within the limit for hangs no rank may be called hung for it.

    Args:
        how: ``sleep``: each phase of each shard begins late. ``quota``: the kernel gives the whole
            process only a share of a CPU (cgroup v1 or v2). ``duty``: a thread of the process takes
            a share of a CPU for itself.
        delay_ms: for ``sleep``, the delay in milliseconds.
        cpu_fraction: for ``quota``, the share of one CPU that is left, above 0 and up to 1; for
            ``duty``, the share that is burnt.
        steps: number of steps that it lasts.
    """

    how: str = "sleep"
    delay_ms: float = 20.0
    cpu_fraction: float = 0.5
    steps: int = 10

    family: ClassVar[str] = "time"
    leads_to: ClassVar[frozenset[str]] = HUNG_CAUSES | {"slow"}
    effect: ClassVar[str] = "one rank is slow for some steps, and all wait for it"
    evidence: ClassVar[str] = (
        "the measured delay, the kernel's count of times that it was throttled, or the CPU time of the burning thread"
    )
    stands_for: ClassVar[str] = "overheated or crowded machines"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.THERMAL,
        incidents.CPU_OVERLOAD,
        incidents.SLOW,
    )
    impact: ClassVar[str] = (
        "none is wanted: steps take longer, and a rank that is blamed for it is a false alarm"
    )
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    undo: ClassVar[str] = (
        "the control group is removed at the end; if the run is killed, by its guard; the rest ends by itself"
    )

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("cpu")
        return f"how='quota' only: {reason}" if reason else ""

    @property
    def from_outside(self) -> bool:
        return self.how == "quota"

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (CapProcessCpu,) if self.how == "quota" else ()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")
        if self.how == "sleep" and not 0 < self.delay_ms < 1e6:
            raise BadInput(
                "delay_ms", self.delay_ms, "use more than 0 milliseconds, and less than 1000 s"
            )
        if self.how != "sleep" and not 0 < self.cpu_fraction <= 1:
            raise BadInput(
                "cpu_fraction", self.cpu_fraction, "use a share of one CPU above 0, up to 1"
            )
        if self.steps < 1:
            raise BadInput("steps", self.steps, "use 1 or more")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        if self.how == "sleep":
            target.act("delay", delay_ms=self.delay_ms, steps=self.steps)
            yield await target.read_back()
        elif self.how == "duty":
            target.act("burn", cpu_fraction=self.cpu_fraction, steps=self.steps, name=_BURNER)
            yield await target.seen(lambda: _burnt(target))
        else:
            limit = CapProcessCpu(target.pid, target.process.ticks, self.cpu_fraction)
            with target.applied(limit) as applied:
                target.release()
                # the limit lasts until the steps are over, or the process has ended
                await target.heard(lambda: self._is_over(target), after_end=True)
                if periods := applied.shown():
                    words = f"pid {target.pid} was held back in {periods} periods"
                    source = "the count of its limit"
                    yield Counted(
                        subject=target.rank_process, source=source, count=periods, seen=words
                    )

    def _is_over(self, target: Target) -> bool:
        """Return True once the slow steps are taken, or the worker has ended or is given up."""
        last_step = target.step + self.steps
        return (
            target.exit is not None
            or target.lost is not None
            or (target.beat is not None and target.beat.step >= last_step)
            or target.logged_step >= last_step
        )


def _burnt(target: Target) -> Counted | None:
    """Return evidence of the CPU time of the burning thread; None while it is below 20 ms."""
    for tid, thread in target.process.threads().items():
        ticks = thread.cpu_ticks
        if thread.name == _BURNER and ticks >= _BURNT_TICKS:
            words = f"thread {tid} ({thread.name}) of pid {target.pid} used {ticks * 10} ms of CPU"
            return Counted(
                subject=target.rank_process,
                source="the kernel's count of its time",
                count=ticks,
                seen=words,
            )
    return None
