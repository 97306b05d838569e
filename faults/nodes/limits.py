"""Faults that limit a node: its CPU time, memory, processes or writes to disk.

A limit holds for all processes of the node together, and for those that they start.

-> substrate/limits/holds.py sets each limit and counts its effects, by substrate/limits/cgroup.py;
substrate/docker/holds.py for containers. runtime/injection/ending.py uses the memory up.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import (
    CONTROLLERS,
    Action,
    CapCpu,
    CapMemory,
    CapPids,
    CapWrites,
)
from chaoskit.substrate.limits import cgroup
from chaoskit.vocabulary import FAILED_CAUSES, HUNG_CAUSES

_MIB = 2**20
_UNDO = "the control group is removed when the limit ends; if the run is killed, by its guard"
#: Causes of the losses of workers of a node that has too little of something.
_LIMITED_CAUSES = HUNG_CAUSES | {"node lost", "slow", "unreachable"}
_GIVE_UP = 8  # times the headroom: bounds the damage of a limit that does not hold


@dataclass(frozen=True, kw_only=True)
class LimitCpu(Fault):
    """Leave the node a part of its CPU time, for agent, workers and spares together.

    No rank may be blamed for it.

    Args:
        lift_after_s: seconds that the limit lasts once it has had an effect; without one it lasts
            until the run ends.
        cores: number of CPUs that are left, such as 0.25.
    """

    lift_after_s: float = 1.0
    cores: float = 0.25

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = _LIMITED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (CapCpu,)
    effect: ClassVar[str] = (
        "one node has little CPU time: agent, workers and spares share what is left"
    )
    evidence: ClassVar[str] = "the kernel counts periods in which it held the node back"
    stands_for: ClassVar[str] = (
        "neighbours on a crowded machine, and container limits that are too low"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OVERLOAD, incidents.SLOW)
    impact: ClassVar[str] = "none is wanted: steps take longer"
    undo: ClassVar[str] = _UNDO

    @classmethod
    def unavailable(cls) -> str:
        return cgroup.unavailable(CONTROLLERS[CapCpu])

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lift_after_s", self.lift_after_s, above_0=True)
        if not 0 < self.cores < math.inf:
            raise BadInput("cores", self.cores, "use a number of CPUs above 0")

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(events: int) -> str:
            return f"the kernel held {target.node} back in {events} periods"

        return _limit_node(target, CapCpu(self.cores), self.lift_after_s, in_words)


@dataclass(frozen=True, kw_only=True)
class LimitMemory(Fault):
    """Leave the node a little memory, and let the rank use it up.

    The kernel chooses which process of the node it ends. Unlike with ``OutOfMemory``, all processes
    that the node starts before the limit ends are under it, too.

    Args:
        lift_after_s: seconds that the limit lasts once it has had an effect; without one it lasts
            until the run ends.
        headroom_mib: memory that the node may use beyond its present use, in MiB.
    """

    lift_after_s: float = 1.0
    headroom_mib: float = 16.0

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = False  # the rank itself takes the memory
    leads_to: ClassVar[frozenset[str]] = _LIMITED_CAUSES | FAILED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (CapMemory,)
    effect: ClassVar[str] = "one node has no memory left, and the kernel ends processes of it"
    evidence: ClassVar[str] = (
        "the kernel counts processes of the node that it killed for want of memory"
    )
    stands_for: ClassVar[str] = "host memory used up, by whichever process"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    impact: ClassVar[str] = "a worker of the node is given up, or all of them with their agent"
    undo: ClassVar[str] = _UNDO

    @classmethod
    def unavailable(cls) -> str:
        return cgroup.unavailable(CONTROLLERS[CapMemory])

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lift_after_s", self.lift_after_s, above_0=True)
        if not 1 <= self.headroom_mib < math.inf:
            raise BadInput("headroom_mib", self.headroom_mib, "use a number of MiB, 1 or more")

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        headroom_bytes = round(self.headroom_mib * _MIB)

        def allocate() -> None:
            target.act("allocate", give_up_bytes=_GIVE_UP * headroom_bytes)

        def in_words(events: int) -> str:
            return f"the kernel killed {events} processes of {target.node} for want of memory"

        return _limit_node(
            target, CapMemory(headroom_bytes), self.lift_after_s, in_words, release=allocate
        )


@dataclass(frozen=True, kw_only=True)
class LimitPids(Fault):
    """Let the node start few further processes and threads.

    It acts when a worker is replaced, or the world regroups.

    Args:
        lift_after_s: seconds that the limit lasts once it has had an effect; without one it lasts
            until the run ends.
        further: number of processes and threads that the node may still start.
    """

    lift_after_s: float = 1.0
    further: int = 0

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = _LIMITED_CAUSES | FAILED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (CapPids,)
    effect: ClassVar[str] = "one node can start neither processes nor threads"
    evidence: ClassVar[str] = "the kernel counts processes and threads that it refused"
    stands_for: ClassVar[str] = "limits of processes that are used up, by leaks or by other users"
    unlisted: ClassVar[str] = "the tables do not tell such limits from other failures of a host"
    impact: ClassVar[str] = (
        "replacements cannot be started there, and a process that needs a new thread fails"
    )
    undo: ClassVar[str] = _UNDO
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}, Kill(rank=2, at_step=22)])'
    )

    @classmethod
    def unavailable(cls) -> str:
        return cgroup.unavailable(CONTROLLERS[CapPids])

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lift_after_s", self.lift_after_s, above_0=True)
        if self.further < 0:
            raise BadInput(
                "further", self.further, "use a number of processes and threads, 0 or more"
            )

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(events: int) -> str:
            return f"the kernel refused {target.node} {events} processes or threads"

        return _limit_node(target, CapPids(self.further), self.lift_after_s, in_words)


@dataclass(frozen=True, kw_only=True)
class LimitIo(Fault):
    """Let the node write slowly to the disk of the run's directory.

    It acts if the job writes, and waits for it. Under cgroup v1 the kernel holds back only writes
    for which a process waits, as with ``fsync``.

    Args:
        lift_after_s: seconds that the limit lasts once it has had an effect; without one it lasts
            until the run ends.
        bytes_per_s: number of bytes a second that the node may write.
    """

    lift_after_s: float = 1.0
    bytes_per_s: float = 1e6

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = _LIMITED_CAUSES
    needs: ClassVar[tuple[type[Action], ...]] = (CapWrites,)
    effect: ClassVar[str] = "one node writes slowly to its disk"
    evidence: ClassVar[str] = (
        "the kernel counts so many written bytes that the node used up what it may write"
    )
    stands_for: ClassVar[str] = "disks that wear out, and neighbours that write much"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SLOW,)
    impact: ClassVar[str] = "none is wanted: a process that writes waits, and all others with it"
    undo: ClassVar[str] = _UNDO

    @classmethod
    def unavailable(cls) -> str:
        return cgroup.unavailable(CONTROLLERS[CapWrites])

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lift_after_s", self.lift_after_s, above_0=True)
        if not 1 <= self.bytes_per_s < math.inf:
            raise BadInput(
                "bytes_per_s", self.bytes_per_s, "use a number of bytes a second, 1 or more"
            )

    def inject(self, target: Target) -> AsyncIterator[Evidence]:
        def in_words(events: int) -> str:
            return f"{target.node} used up what it may write for {events / 4:g} s"

        return _limit_node(target, CapWrites(self.bytes_per_s), self.lift_after_s, in_words)


async def _limit_node(
    target: Target,
    limit: Action,
    lift_after_s: float,
    in_words: Callable[[int], str],
    *,
    release: Callable[[], None] | None = None,
) -> AsyncGenerator[Evidence]:
    """Limit the target's node, and yield evidence once the kernel has counted an effect.

    Without an effect there is no evidence, and the limit lasts until the run ends.

    Args:
        lift_after_s: seconds after the first effect at which the limit is lifted.
        in_words: returns the count of the kernel in words.
        release: releases the rank under the limit; None for a rank that does nothing to itself.
    """
    with target.applied(limit) as applied:
        (release or target.release)()
        source = "the kernel's count for its group"
        yield await target.counted(applied, target.whole_node, source, in_words)
        await target.sleep(lift_after_s)
    target.lifted()
