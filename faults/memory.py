"""Memory that runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.substrate.cgroup import Cgroup, confine, unavailable
from chaoskit.vocabulary import FAILED_CAUSES
from faults import incidents
from faults.base import Fault, Target
from faults.incidents import IncidentKind

HOWS = ("cgroup", "error")

_HEADROOM_BYTES = 16 * 2**20  # what the process may still take before the kernel ends it
_GIVE_UP_BYTES = 8 * _HEADROOM_BYTES  # a limit that does not hold must not eat the machine


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Fault):
    """Let a rank use up its memory.

    Args:
        how: ``cgroup``: the process is limited to a little more than it uses now (cgroup v1 or v2), and takes memory
            until the kernel kills it. ``error``: the allocator refuses, and MemoryError is raised in the training
            thread.
    """

    how: str = "cgroup"

    family: ClassVar[str] = "process"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = "the kernel kills a rank that uses too much memory, or its allocator refuses to give any"
    evidence: ClassVar[str] = (
        "the control group's count of kills and SIGKILL as seen by its parent; or the process ended with MemoryError"
    )
    stands_for: ClassVar[str] = "host memory used up"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "how": "error"}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({"how": "cgroup"}, {"how": "error"})
    undo: ClassVar[str] = "the control group is removed at the end of the run; if that is killed, by its guard"

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("memory")
        return f"how='cgroup' only: {reason}" if reason else ""

    @property
    def leads_to(self) -> frozenset[str]:
        return FAILED_CAUSES  # before it kills, the kernel reclaims memory for a while, and may refuse a fork

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")
        if self.how == "cgroup" and (reason := unavailable("memory")):
            raise BadInput("how", self.how, f"use 'error' on this machine: {reason}")

    def inject(self, target: Target) -> None:
        if self.how == "error":
            target.pull("memory_error")
            return
        try:
            target.notes["group"] = confine(target.pid, target.ticks, target.undo, _HEADROOM_BYTES)
        except BaseException:
            target.pull("none")  # it must not take memory without a limit, nor be left waiting
            raise
        target.pull("allocate", give_up_bytes=_GIVE_UP_BYTES)

    def observe(self, target: Target) -> str | None:
        if self.how == "error":
            raised = target.lost is not None and target.lost.cause == "raised" and "MemoryError" in target.lost.detail
            return f"the process ended with {target.lost.detail.strip(' :')}" if raised and target.lost else None
        _count(target)
        kills = target.notes.get("kills", 0)
        if not kills or target.exited != ("killed", "SIGKILL"):
            return None
        return f"the kernel counted {kills} kill for lack of memory, and pid {target.pid} was killed by SIGKILL"

    def clean_up(self, target: Target) -> bool:
        group: Cgroup | None = target.notes.get("group")
        if group is None:
            return True
        _count(target)
        return group.remove()


def _count(target: Target) -> None:
    """Note the group's count of kills, as long as there is the group."""
    group: Cgroup | None = target.notes.get("group")
    if group is not None:
        with contextlib.suppress(OSError):
            target.notes["kills"] = group.oom_kills()
