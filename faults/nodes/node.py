"""A node that ends, or ceases to move: its agent and all its workers at once."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec

from chaoskit.config import RunConfig
from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, require_seconds
from chaoskit.faults.evidence import Evidence, NodeFrozen
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.processes.signals import (
    all_gone,
    continued_afterwards,
    gone,
    look_up,
    signal_all,
)
from chaoskit.faults.target import Target
from chaoskit.substrate.core.actions import Action, Applied, Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.vocabulary import EXITED, HUNG_CAUSES

FREEZES = ("signal", "cgroup")
_ENDS_S = 1.0  # within which what an agent had started ends with it
_STILL_S = 0.05  # an agent runs some hundred times a second


@dataclass(frozen=True, kw_only=True)
class NodeFault(Fault):
    """Base of the faults that strike the node on which the rank runs."""

    whole_node: ClassVar[bool] = True

    @property
    def from_outside(self) -> bool:
        return True

    @property
    def leads_to(self) -> frozenset[str]:
        return frozenset({EXITED, "node lost"})


def require_no_replacements(fault: Fault, config: RunConfig) -> None:
    """Refuse a run that replaces nodes by itself, for a fault that does. Raises BadInput."""
    if config.node_replacements:
        remedy = f"use 0: {fault.kind} brings a node, and there would be two under one name"
        raise BadInput("node_replacements", config.node_replacements, remedy)


@dataclass(frozen=True, kw_only=True)
class KillAgent(NodeFault):
    """SIGKILL the agent of the rank's node, and nothing else: what it started must end with it."""

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "the agent of one node ends at once; its workers may not go on unwatched"
    )
    evidence: ClassVar[str] = "the agent and every process that it had started are gone"
    stands_for: ClassVar[str] = "a node daemon that is killed for want of memory"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    impact: ClassVar[str] = "the workers of the node are given up"
    of_runtime: ClassVar[bool] = True  # of another launcher's, what it started need not end with it

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        agent, *_ = processes = look_up(target)
        if agent != target.cluster.root(
            target.node
        ):  # it ends already: what is listed first is its child
            raise ProcessLookupError(f"the agent of {target.node} is gone")
        agent.signal(signal.SIGKILL)
        # the rank stands until it has ended with its agent: else it would take part in the step for a moment
        await target.seen(lambda: gone(processes, target.node), limit_s=_ENDS_S)
        target.release()
        yield await all_gone(target, processes)


@dataclass(frozen=True, kw_only=True)
class KillNode(NodeFault):
    """SIGKILL the agent, the zygote and all workers of the rank's node, as if its power had failed."""

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = (
        "one node is gone at once: agent, workers, spares, and all that was in their memory"
    )
    evidence: ClassVar[str] = "every process of the node is gone"
    stands_for: ClassVar[str] = "machines that fail as a whole"
    counted: ClassVar[tuple[IncidentKind, ...]] = (
        incidents.POWER,
        incidents.CHASSIS,
        incidents.IO_BOARD,
        incidents.CPU,
        incidents.SYSTEM_MEMORY,
        incidents.KERNEL_PANIC,
    )
    impact: ClassVar[str] = "the node's connection ends, and its workers are given up"
    ends_node: ClassVar[bool] = True

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        signal_all(processes, signal.SIGKILL)
        target.release()
        yield await all_gone(target, processes)


@dataclass(frozen=True, kw_only=True)
class Preempt(NodeFault):
    """Take a node away as a cloud does: SIGTERM to its agent and workers; after a grace period, SIGKILL.

    Args:
        grace_s: how long they may take to end by themselves.
    """

    grace_s: float = 0.5

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = "one node is told to end, and after a grace period made to"
    evidence: ClassVar[str] = "every process of the node is gone"
    stands_for: ClassVar[str] = "host maintenance, and reclaimed spot instances"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = "the workers of the node are given up"
    ends_node: ClassVar[bool] = True

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("grace_s", self.grace_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        agent, *others = processes = look_up(target)
        signal_all([agent, *(one for one in others if one.name != "ck-zygote")], signal.SIGTERM)
        target.release()
        seen = await target.seen(lambda: gone(processes, target.node), limit_s=self.grace_s)
        left = (
            [] if seen is not None else [process for process in processes if not process.is_gone()]
        )
        if seen is None:
            target.acts()
            signal_all(left, signal.SIGKILL)
            seen = await all_gone(target, processes)
        yield msgspec.structs.replace(seen, more=f", {len(left)} of them after the grace period")


@dataclass(frozen=True, kw_only=True)
class FreezeNode(NodeFault):
    """Have every process of a node stand still, until it is given up, and go on later: zombies come back.

    Its kernel goes on to acknowledge what the node is sent, so the node is given up after a second, or its lease where
    that is longer, and not within three heartbeats as one that is cut off.

    Args:
        how: ``signal``: each process is stopped by SIGSTOP, as a debugger does. ``cgroup``: the kernel's freezer
            (cgroup v1 or v2) stops all of them together, and whatever they were about to start; no process can see it.
        thaw_after_s: when they go on. The others have long regrouped if this is more than a second, and more than
            ``heartbeat_ms * lease_beats``.
    """

    how: str = "signal"
    thaw_after_s: float = 2.0

    family: ClassVar[str] = "node"
    effect: ClassVar[str] = (
        "one node stands still without a word, and returns when it is no part of the world any more"
    )
    evidence: ClassVar[str] = (
        "the kernel reports every process of the node stopped, all at the same time; or its freezer says so, and none "
        "is given a CPU any more"
    )
    stands_for: ClassVar[str] = (
        "hosts that stall and come back, such as virtual machines that migrate"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.GPU_PROCESSOR,)
    impact: ClassVar[str] = (
        "the node is given up with its workers, and nothing that they say when they return counts"
    )
    undo: ClassVar[str] = (
        "each process is continued, or the group is thawed, by the harness, or by its guard"
    )
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in FREEZES)

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("freezer")
        return f"how='cgroup' only: {reason}" if reason else ""

    @property
    def needs(self) -> tuple[type[Action], ...]:
        return (Freeze,) if self.how == "cgroup" else ()

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | HUNG_CAUSES | {"stopped"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in FREEZES:
            raise BadInput("how", self.how, f"use one of {', '.join(FREEZES)}")
        require_seconds("thaw_after_s", self.thaw_after_s, above_0=True)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        target.release()  # once continued, the rank goes on as if nothing had been
        with contextlib.ExitStack() as held:
            if self.how == "cgroup":
                freeze = held.enter_context(target.applied(Freeze()))
                processes = [one for one in processes if not one.is_gone()] or processes
                look = _Frozen(target, processes, freeze).look
            else:
                held.enter_context(continued_afterwards(target, processes))
                signal_all(
                    processes, signal.SIGSTOP
                )  # the agent first: it must not report the others
                while new := self._started_meanwhile(target, processes):
                    held.enter_context(continued_afterwards(target, new))
                    signal_all(new, signal.SIGSTOP)
                    processes += new
                look = partial(_all_stopped, target, processes)
            # a harness that was busy for so long must not thaw it unseen; where one is gone it is never seen
            seen = await target.seen(lambda: look() or any(one.is_gone() for one in processes))
            if isinstance(seen, NodeFrozen):
                yield seen
            await target.sleep(self.thaw_after_s - target.seconds_since)
        target.lifted()

    def _started_meanwhile(self, target: Target, known: Sequence[Process]) -> list[Process]:
        """Processes of the node that were started while those before were stopped."""
        pids = {process.pid for process in known}
        return [process for process in target.cluster.node(target.node) if process.pid not in pids]


def _all_stopped(target: Target, processes: Sequence[Process]) -> NodeFrozen | None:
    if not all(process.is_stopped() for process in processes):
        return None
    return NodeFrozen(
        subject=target.whole_node, source="the kernel's states of them", processes=len(processes)
    )


class _Frozen:
    """Whether the freezer holds all processes of a node, and none of them has been given a CPU for a moment."""

    def __init__(self, target: Target, processes: Sequence[Process], freeze: Applied) -> None:
        self._target, self._processes, self._freeze = target, processes, freeze
        self._since_s, self._switches = time.monotonic(), self._count()

    def _count(self) -> list[int | None]:
        """How often the kernel took a CPU from each."""
        threads = [process.threads().get(process.pid) for process in self._processes]
        return [thread and thread.switches for thread in threads]

    def look(self) -> NodeFrozen | None:
        now_s, now = time.monotonic(), self._count()
        if now != self._switches or None in now or not self._freeze.shown():
            self._since_s, self._switches = now_s, now
        if (still_s := now_s - self._since_s) < _STILL_S:
            return None
        source = "the kernel's freezer, and its counts of their switches"
        many = len(self._processes)
        return NodeFrozen(
            subject=self._target.whole_node, source=source, processes=many, still_s=still_s
        )
