"""A node that ends, or ceases to move: its agent and all its workers at once."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from chaoskit import osprocess
from chaoskit.errors import BadInput
from chaoskit.substrate.actions import Applied, Freeze
from chaoskit.substrate.base import Process
from chaoskit.substrate.cgroup import unavailable
from chaoskit.substrate.undo import ContinueEntry
from chaoskit.vocabulary import EXITED, HUNG_CAUSES
from faults import incidents
from faults.base import Fault, Target, require_seconds
from faults.incidents import IncidentKind

FREEZES = ("signal", "cgroup")
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


@dataclass(frozen=True, kw_only=True)
class KillAgent(NodeFault):
    """SIGKILL the agent of the rank's node, and nothing else: what it started must end with it."""

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = "the agent of one node ends at once; its workers may not go on unwatched"
    evidence: ClassVar[str] = "the agent and every process that it had started are gone"
    stands_for: ClassVar[str] = "a node daemon that is killed for want of memory"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CPU_OOM,)
    impact: ClassVar[str] = "the workers of the node are given up"
    of_runtime: ClassVar[bool] = True  # of another launcher's, what it started need not end with it

    def inject(self, target: Target) -> None:
        agent, *_ = look_up(target)
        if agent.pid != target.cluster.first_pid(target.node):  # it ends already: what is listed first is its child
            raise ProcessLookupError(f"the agent of {target.node} is gone")
        target.cluster.signal_process(agent, signal.SIGKILL)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return all_gone(target)


@dataclass(frozen=True, kw_only=True)
class KillNode(NodeFault):
    """SIGKILL the agent, the zygote and all workers of the rank's node, as if its power had failed."""

    family: ClassVar[str] = "node"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = "one node is gone at once: agent, workers, spares, and all that was in their memory"
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

    def inject(self, target: Target) -> None:
        signal_all(target, look_up(target), signal.SIGKILL)
        target.pull("none")

    def observe(self, target: Target) -> str | None:
        return all_gone(target)


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

    def inject(self, target: Target) -> None:
        agent, *others = look_up(target)
        signal_all(target, [agent, *(one for one in others if one.name != "ck-zygote")], signal.SIGTERM)
        target.pull("none")

    def next_act_s(self, target: Target) -> float:
        return math.inf if "forced" in target.notes else self.grace_s

    def again(self, target: Target, message: Any) -> bool:
        if target.seconds_since < self.grace_s or "forced" in target.notes:
            return False
        left = [process for process in target.notes["processes"] if not _is_gone(process)]
        target.notes["forced"] = len(left)
        target.acted_ns = time.monotonic_ns()
        signal_all(target, left, signal.SIGKILL)
        return False

    def observe(self, target: Target) -> str | None:
        gone = all_gone(target)
        return gone and f"{gone}, {target.notes.get('forced', 0)} of them after the grace period"


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
    effect: ClassVar[str] = "one node stands still without a word, and returns when it is no part of the world any more"
    evidence: ClassVar[str] = (
        "the kernel reports every process of the node stopped, all at the same time; or its freezer says so, and none "
        "is given a CPU any more"
    )
    stands_for: ClassVar[str] = "hosts that stall and come back, such as virtual machines that migrate"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.GPU_PROCESSOR,)
    impact: ClassVar[str] = "the node is given up with its workers, and nothing that they say when they return counts"
    undo: ClassVar[str] = "each process is continued, or the group is thawed, by the harness, or by its guard"
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in FREEZES)

    @classmethod
    def restricted(cls) -> str:
        reason = unavailable("freezer")
        return f"how='cgroup' only: {reason}" if reason else ""

    @property
    def leads_to(self) -> frozenset[str]:
        return super().leads_to | HUNG_CAUSES | {"stopped"}

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in FREEZES:
            raise BadInput("how", self.how, f"use one of {', '.join(FREEZES)}")
        if self.how == "cgroup" and (reason := unavailable("freezer")):
            raise BadInput("how", self.how, f"use 'signal' on this machine: {reason}")
        require_seconds("thaw_after_s", self.thaw_after_s, above_0=True)

    def inject(self, target: Target) -> None:
        processes = look_up(target)
        target.pull("none")  # once continued, the rank goes on as if nothing had been
        if self.how == "cgroup":
            target.notes["freeze"] = target.cluster.apply(target.node, Freeze())
            target.notes["processes"] = [one for one in processes if not _is_gone(one)] or processes
            return
        target.notes["undo"] = target.undo.plan(*(ContinueEntry(one.pid, one.ticks) for one in processes))
        signal_all(target, processes, signal.SIGSTOP)  # the agent first: it must not report the others

    def next_act_s(self, target: Target) -> float:
        return math.inf if "thawed" in target.notes else self.thaw_after_s

    def again(self, target: Target, message: Any) -> bool:
        if target.seconds_since >= self.thaw_after_s and "thawed" not in target.notes and self._was_seen(target):
            target.acted_ns = target.lifted_ns = time.monotonic_ns()
            self._thaw(target)
        return False

    def _was_seen(self, target: Target) -> bool:
        """Whether there is evidence, or never will be: a harness that was busy for so long must not thaw unseen."""
        return "seen" in target.notes or any(map(_is_gone, target.notes.get("processes", [])))

    def _thaw(self, target: Target) -> None:
        target.notes["thawed"] = True
        if self.how == "cgroup":
            freeze: Applied | None = target.notes.get("freeze")
            target.notes["melted"] = freeze is None or freeze.lift()
            return
        for process in reversed(target.notes.get("processes", [])):  # workers first: the agent finds them moving
            osprocess.kill_if_same(process.pid, process.ticks, signal.SIGCONT)

    def observe(self, target: Target) -> str | None:
        found = self._look(target)
        if found is not None:
            target.notes["seen"] = True
        return found

    def _look(self, target: Target) -> str | None:
        processes: list[Process] = target.notes["processes"]
        if self.how == "cgroup":
            freeze: Applied = target.notes["freeze"]
            still_s = self._still_s(target, processes) if freeze.shown() else 0.0
            if still_s < _STILL_S:
                return None
            many = f"all {len(processes)} processes of {target.node}"
            return f"{many} are frozen: none has run for {still_s * 1000:.0f} ms"
        if not all(osprocess.is_stopped(process.pid, process.ticks) for process in processes):
            return None
        return f"all {len(processes)} processes of {target.node} are in state T (stopped)"

    def _still_s(self, target: Target, processes: Sequence[Process]) -> float:
        """For how long no process has been given a CPU, by the kernel's count of each one's switches."""
        now_s, now = time.monotonic(), [osprocess.switches(process.pid, process.pid) for process in processes]
        since_s, before = cast("tuple[float, list[int | None]]", target.notes.setdefault("still", (now_s, now)))
        if now != before or None in now:
            target.notes["still"] = (now_s, now)
            return 0.0
        return now_s - since_s

    def clean_up(self, target: Target) -> bool:
        self._thaw(target)
        if self.how == "cgroup":
            return bool(target.notes["melted"])
        processes: list[Process] = target.notes.get("processes", [])
        if any(osprocess.is_stopped(process.pid, process.ticks) for process in processes):
            return False
        if "undo" in target.notes:
            target.notes["undo"].done()
        return True


def look_up(target: Target) -> list[Process]:
    """The processes of the target's node, now: agent first."""
    processes = target.cluster.node(target.node)
    target.notes["processes"] = processes
    if not processes:
        raise ProcessLookupError(f"{target.node} has no process any more")
    return processes


def signal_all(target: Target, processes: Iterable[Process], signum: int) -> None:
    """Send a signal to each that is still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # ended with its parent meanwhile
            target.cluster.signal_process(process, signum)


def _is_gone(process: Process) -> bool:
    return osprocess.start_ticks(process.pid) != process.ticks or osprocess.is_ending(process.pid)


def all_gone(target: Target, node: str = "", processes: Sequence[Process] = ()) -> str | None:
    """That no process of the struck node, or of the one that is named, is left, in words; None if some are."""
    node, processes = node or target.node, processes or target.notes["processes"]
    if target.exited is not None:
        return None  # the run is over, and its agent lived to tell how the worker ended: now everything is gone
    if not all(_is_gone(process) for process in processes):
        return None
    first = "the agent" if processes[0].name.startswith("ck-") else processes[0].name
    return f"{first} of {node} (pid {processes[0].pid}) and its {len(processes) - 1} other processes are gone"
