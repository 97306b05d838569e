"""Faults of a node that ends or freezes: its agent and all its workers at once.

-> coordinator/detectors/contact.py: when a node that says nothing is given up.
-> substrate/limits/holds.py freezes a node by a control group; processes/signals.py by signals.
"""

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
from chaoskit.faults.target import Target, after_act
from chaoskit.substrate.core.actions import Action, Applied, Freeze
from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.limits.cgroup import unavailable
from chaoskit.vocabulary import EXITED, HUNG_CAUSES

FREEZES = ("signal", "cgroup")
#: Causes of the losses of workers when their node ends.
NODE_LOST_CAUSES = frozenset({EXITED, "node lost"})
_ENDS_S = 1.0  # time in which the children of an agent end with it
_STILL_S = 0.05  # an agent that is not frozen runs some hundred times a second


def require_no_replacements(fault: Fault, config: RunConfig) -> None:
    """Raise BadInput if the run replaces nodes by itself, for a fault that adds a node."""
    if config.node_replacements:
        remedy = f"use 0: {fault.kind} brings a node, and there would be two under one name"
        raise BadInput("node_replacements", config.node_replacements, remedy)


@dataclass(frozen=True, kw_only=True)
class KillAgent(Fault):
    """SIGKILL the agent of the rank's node, and nothing else.

    The processes that it started must end with it.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    of_runtime: ClassVar[bool] = True  # another launcher's workers need not end with it
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES
    effect: ClassVar[str] = (
        "the agent of one node ends at once; its workers may not go on unwatched"
    )
    evidence: ClassVar[str] = "the agent and every process that it had started are gone"
    stands_for: ClassVar[str] = "a node daemon that is killed for want of memory"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    impact: ClassVar[str] = "the workers of the node are given up"

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        agent, *_ = processes = look_up(target)
        if agent != target.cluster.root(target.node):  # the agent has ended
            raise ProcessLookupError(f"the agent of {target.node} is gone")
        agent.signal(signal.SIGKILL)
        # the rank waits until it has ended with its agent: released, it would take part in the step
        await target.seen(lambda: gone(processes, target.node), limit_s=_ENDS_S)
        target.release()
        yield await all_gone(target, processes)


@dataclass(frozen=True, kw_only=True)
class KillNode(Fault):
    """SIGKILL all processes of the rank's node: agent, zygote and workers.

    It looks as if the power of the node had failed.
    """

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    is_felt: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES
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

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        signal_all(processes, signal.SIGKILL)
        target.release()
        yield await all_gone(target, processes)


@dataclass(frozen=True, kw_only=True)
class Preempt(Fault):
    """Take a node away as a cloud does.

    Its agent and workers get SIGTERM, and after a grace period SIGKILL.

    Args:
        grace_s: seconds that they have to end by themselves.
    """

    grace_s: float = 0.5

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    ends_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES
    effect: ClassVar[str] = "one node is told to end, and after a grace period made to"
    evidence: ClassVar[str] = "every process of the node is gone"
    stands_for: ClassVar[str] = "host maintenance, and reclaimed spot instances"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.MAINTENANCE,)
    impact: ClassVar[str] = "the workers of the node are given up"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        require_seconds("grace_s", self.grace_s)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        agent, *others = processes = look_up(target)
        signal_all(
            [agent, *(process for process in others if process.name != "ck-zygote")], signal.SIGTERM
        )
        target.release()
        evidence = await target.seen(lambda: gone(processes, target.node), limit_s=self.grace_s)
        remaining = (
            []
            if evidence is not None
            else [process for process in processes if not process.is_gone()]
        )
        if evidence is None:
            target.acts()
            signal_all(remaining, signal.SIGKILL)
            evidence = await all_gone(target, processes)
        yield msgspec.structs.replace(
            evidence, more=f", {len(remaining)} of them after the grace period"
        )


@dataclass(frozen=True, kw_only=True)
class FreezeNode(Fault):
    """Freeze every process of a node until it is given up, and let them go on later as zombies.

    Its kernel goes on to acknowledge packets to the node. So the node is given up after a second,
    or after its lease if that is longer, and not within three heartbeats as one that is cut off.

    Args:
        how: ``signal``: each process is stopped by SIGSTOP, as a debugger does. ``cgroup``: the
            kernel's freezer (cgroup v1 or v2) stops all of them together, and whatever they were
            about to start; no process can see it.
        thaw_after_s: seconds after which they go on. The others have long regrouped if this is more
            than a second, and more than ``heartbeat_ms * lease_beats``.
    """

    how: str = "signal"
    thaw_after_s: float = 2.0

    family: ClassVar[str] = "node"
    whole_node: ClassVar[bool] = True
    from_outside: ClassVar[bool] = True
    leads_to: ClassVar[frozenset[str]] = NODE_LOST_CAUSES | HUNG_CAUSES | {"stopped"}
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

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in FREEZES:
            raise BadInput("how", self.how, f"use one of {', '.join(FREEZES)}")
        require_seconds("thaw_after_s", self.thaw_after_s, above_0=True)

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        processes = look_up(target)
        target.release()  # the continued rank must not wait at its hook
        with contextlib.ExitStack() as undone_at_end:
            if self.how == "cgroup":
                freeze = undone_at_end.enter_context(target.applied(Freeze()))
                processes = [process for process in processes if not process.is_gone()] or processes
                look = _FreezeWatch(target, processes, freeze).look
            else:
                undone_at_end.enter_context(continued_afterwards(target, processes))
                signal_all(
                    processes, signal.SIGSTOP
                )  # the agent first: it must not report the others
                undone_at_end.enter_context(after_act())
                while new := self._started_meanwhile(target, processes):
                    undone_at_end.enter_context(continued_afterwards(target, new))
                    signal_all(new, signal.SIGSTOP)
                    processes += new
                look = partial(_stop_evidence, target, processes)
            # a busy harness must not thaw before it has seen the freeze; a process that is gone
            # never shows it
            evidence = await target.seen(
                lambda: look() or any(process.is_gone() for process in processes)
            )
            if isinstance(evidence, NodeFrozen):
                yield evidence
            await target.sleep(self.thaw_after_s - target.seconds_since)
        target.lifted()

    def _started_meanwhile(self, target: Target, stopped: Sequence[Process]) -> list[Process]:
        """Return the processes of the node that were started while the others were stopped."""
        pids = {process.pid for process in stopped}
        return [process for process in target.cluster.node(target.node) if process.pid not in pids]


def _stop_evidence(target: Target, processes: Sequence[Process]) -> NodeFrozen | None:
    """Return evidence that all these processes are stopped; None if one is not."""
    if not all(process.is_stopped() for process in processes):
        return None
    return NodeFrozen(
        subject=target.whole_node, source="the kernel's states of them", processes=len(processes)
    )


class _FreezeWatch:
    """Check that the freezer holds all processes of a node, and none of them has run lately."""

    def __init__(self, target: Target, processes: Sequence[Process], freeze: Applied) -> None:
        self._target, self._processes, self._freeze = target, processes, freeze
        self._since_s, self._switches = time.monotonic(), self._count_switches()

    def _count_switches(self) -> list[int | None]:
        """Return the number of context switches of each process; None for one that is gone."""
        threads = [process.threads().get(process.pid) for process in self._processes]
        return [thread and thread.switches for thread in threads]

    def look(self) -> NodeFrozen | None:
        """Return evidence once the freezer has held all processes for 50 ms; None before."""
        now_s, switches = time.monotonic(), self._count_switches()
        if switches != self._switches or None in switches or not self._freeze.shown():
            self._since_s, self._switches = now_s, switches
        if (still_s := now_s - self._since_s) < _STILL_S:
            return None
        source = "the kernel's freezer, and its counts of their switches"
        return NodeFrozen(
            subject=self._target.whole_node,
            source=source,
            processes=len(self._processes),
            still_s=still_s,
        )
