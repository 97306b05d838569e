"""Nodes that have less than they want: of CPU time, memory, processes or writes to disk."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import require_seconds
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.nodes.node import NodeFault
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
_GIVE_UP = 8  # times the headroom: a limit that does not hold must not eat the machine


@dataclass(frozen=True, kw_only=True)
class NodeLimit(NodeFault):
    """Base of the faults that limit all processes of the rank's node together, and those that they start.

    Args:
        lift_after_s: for how long the limit lasts once it has bitten; with the run, if it never does.
    """

    lift_after_s: float = 1.0

    family: ClassVar[str] = "node"
    undo: ClassVar[str] = (
        "the control group is removed when the limit ends; if the run is killed, by its guard"
    )
    #: What it has done to the node.
    makes: ClassVar[type[Action]] = CapCpu

    @classmethod
    def unavailable(cls) -> str:
        return cgroup.unavailable(CONTROLLERS[cls.makes])

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (self.makes,)

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | {"node lost", "slow", "unreachable"}

    @property
    def action(self) -> Action:
        """What is left to the node."""
        raise NotImplementedError

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("lift_after_s", self.lift_after_s, above_0=True)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        with target.applied(self.action) as limit:
            self.release(target)

            source = "the kernel's count for its group"
            yield await target.counted(
                limit, target.whole_node, source, lambda events: self.told(events, target)
            )
            await target.sleep(self.lift_after_s)
        target.lifted()

    def release(self, target: Target) -> None:
        """Let the rank go on, under the limit."""
        target.release()

    def told(self, events: int, target: Target) -> str:
        """What the kernel counted, in words."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LimitCpu(NodeLimit):
    """Leave the node a part of its CPU time, for agent, workers and spares together. No rank may be blamed for it.

    Args:
        cores: that are left, such as 0.25.
    """

    cores: float = 0.25

    effect: ClassVar[str] = (
        "one node has little CPU time: agent, workers and spares share what is left"
    )
    evidence: ClassVar[str] = "the kernel counts periods in which it held the node back"
    stands_for: ClassVar[str] = (
        "neighbours on a crowded machine, and container limits that are too low"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OVERLOAD, incidents.SLOW)
    impact: ClassVar[str] = "none is wanted: steps take longer"
    makes: ClassVar[type[Action]] = CapCpu

    @property
    def action(self) -> Action:
        return CapCpu(self.cores)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 0 < self.cores < math.inf:
            raise BadInput("cores", self.cores, "use a number of CPUs above 0")

    def told(self, events: int, target: Target) -> str:
        return f"the kernel held {target.node} back in {events} periods"


@dataclass(frozen=True, kw_only=True)
class LimitMemory(NodeLimit):
    """Leave the node a little memory, and let the rank take it. The kernel chooses which process of the node it ends.

    Unlike with ``OutOfMemory``, whatever the node starts before the limit ends is under it, too.

    Args:
        headroom_mib: what the node may use beyond what it uses now, in MiB.
    """

    headroom_mib: float = 16.0

    effect: ClassVar[str] = "one node has no memory left, and the kernel ends processes of it"
    evidence: ClassVar[str] = (
        "the kernel counts processes of the node that it killed for want of memory"
    )
    stands_for: ClassVar[str] = "host memory used up, by whichever process"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    makes: ClassVar[type[Action]] = CapMemory
    impact: ClassVar[str] = "a worker of the node is given up, or all of them with their agent"

    @property
    def from_outside(self) -> bool:
        return False  # the rank itself takes the memory

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | FAILED_CAUSES

    @property
    def action(self) -> Action:
        return CapMemory(round(self.headroom_mib * _MIB))

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 1 <= self.headroom_mib < math.inf:
            raise BadInput("headroom_mib", self.headroom_mib, "use a number of MiB, 1 or more")

    def release(self, target: Target) -> None:
        target.act("allocate", give_up_bytes=_GIVE_UP * round(self.headroom_mib * _MIB))

    def told(self, events: int, target: Target) -> str:
        return f"the kernel killed {events} processes of {target.node} for want of memory"


@dataclass(frozen=True, kw_only=True)
class LimitPids(NodeLimit):
    """Let the node start few further processes and threads. It acts where a worker is replaced, or the world regroups.

    Args:
        further: processes and threads that the node may still start.
    """

    further: int = 0

    effect: ClassVar[str] = "one node can start neither processes nor threads"
    evidence: ClassVar[str] = "the kernel counts processes and threads that it refused"
    stands_for: ClassVar[str] = "limits of processes that are used up, by leaks or by other users"
    unlisted: ClassVar[str] = "the tables do not tell such limits from other failures of a host"
    makes: ClassVar[type[Action]] = CapPids
    impact: ClassVar[str] = (
        "replacements cannot be started there, and a process that needs a new thread fails"
    )
    example: ClassVar[str] = (
        'chaos.run("gpt", nodes=4, steps=60, faults=[{fault}, Kill(rank=2, at_step=22)])'
    )

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | FAILED_CAUSES

    @property
    def action(self) -> Action:
        return CapPids(self.further)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.further < 0:
            raise BadInput(
                "further", self.further, "use a number of processes and threads, 0 or more"
            )

    def told(self, events: int, target: Target) -> str:
        return f"the kernel refused {target.node} {events} processes or threads"


@dataclass(frozen=True, kw_only=True)
class LimitIo(NodeLimit):
    """Let the node write slowly to the disk of the run's directory. It bites where the job writes, and waits for it.

    Under cgroup v1 the kernel holds back only what a process waits for, as with ``fsync``.

    Args:
        bytes_per_s: that the node may write.
    """

    bytes_per_s: float = 1e6

    effect: ClassVar[str] = "one node writes slowly to its disk"
    evidence: ClassVar[str] = (
        "the kernel counts so many written bytes that the node used up what it may write"
    )
    stands_for: ClassVar[str] = "disks that wear out, and neighbours that write much"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.SLOW,)
    makes: ClassVar[type[Action]] = CapWrites
    impact: ClassVar[str] = "none is wanted: a process that writes waits, and all others with it"

    @property
    def action(self) -> Action:
        return CapWrites(self.bytes_per_s)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if not 1 <= self.bytes_per_s < math.inf:
            raise BadInput(
                "bytes_per_s", self.bytes_per_s, "use a number of bytes a second, 1 or more"
            )

    def told(self, events: int, target: Target) -> str:
        return f"{target.node} used up what it may write for {events / 4:g} s"
