"""Fault ``OutOfMemory``: a process runs out of memory.

-> runtime/injection/ending.py uses the memory up, in the worker; substrate/limits/holds.py sets
the limit and counts the kills.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Counted, Evidence, LossReported
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, CapProcessMemory
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.vocabulary import FAILED_CAUSES

HOWS = ("cgroup", "error")

_HEADROOM_BYTES = 16 * 2**20  # what the process may still take before the kernel ends it
_GIVE_UP_BYTES = 8 * _HEADROOM_BYTES  # bounds the damage of a limit that does not hold


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Fault):
    """Let a rank use up its memory.

    Args:
        how: ``cgroup``: the process is limited to a little more than it uses now (cgroup v1 or v2),
            and takes memory until the kernel kills it. ``error``: the allocator refuses, and
            MemoryError is raised in the training thread.
    """

    how: str = "cgroup"

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    # the kernel reclaims memory before it kills, and may refuse a fork
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES
    effect: ClassVar[str] = (
        "the kernel kills a rank that uses too much memory, or its allocator refuses to give any"
    )
    evidence: ClassVar[str] = (
        "the control group's count of kills and SIGKILL as seen by its parent; or the process ended with MemoryError"
    )
    stands_for: ClassVar[str] = "host memory used up"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "how": "error"}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({"how": "cgroup"}, {"how": "error"})
    undo: ClassVar[str] = (
        "the control group is removed at the end of the run; if that is killed, by its guard"
    )

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("memory")
        return f"how='cgroup' only: {reason}" if reason else ""

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (CapProcessMemory,) if self.how == "cgroup" else ()

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        if self.how == "error":
            target.act("memory_error")
            lost = await target.heard(lambda: target.lost)
            if lost.cause == "raised" and "MemoryError" in lost.detail:
                words = f"the process ended with {lost.detail.strip(' :')}"
                yield LossReported(
                    subject=target.rank_process, source="its agent", cause=lost.cause, seen=words
                )
            return
        with target.applied(
            CapProcessMemory(target.pid, target.process.ticks, _HEADROOM_BYTES)
        ) as limit:
            target.act("allocate", give_up_bytes=_GIVE_UP_BYTES)
            ended = await target.ended()
            if ended == ("killed", "SIGKILL") and (kills := limit.shown()):
                words = f"the kernel counted {kills} kill for lack of memory, and pid {target.pid} was killed by SIGKILL"
                source, seen_ns = (
                    "the kernel's count for its group, and its parent",
                    target.exited_ns,
                )
                yield Counted(
                    subject=target.rank_process,
                    source=source,
                    observed_ns=seen_ns,
                    count=kills,
                    seen=words,
                )
