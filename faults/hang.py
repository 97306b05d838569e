"""A process that lives and does not move."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaoskit import osprocess
from chaoskit.errors import BadInput
from chaoskit.substrate.undo import ContinueEntry
from chaoskit.vocabulary import HUNG_CAUSES
from faults import incidents
from faults.base import Fault, Target
from faults.incidents import IncidentKind

HOWS = ("stop", "gil", "spin")

_CONTROL = "ck-control"  # name of the thread that answers
_ASK_S = 0.01
_QUESTIONS = 3
_SILENT_S = 0.06  # a healthy control thread answers within a few milliseconds
_TRIES = 10  # context switches; who waits for the interpreter lock tries every 0.5 ms
_SPINNING_TICKS = 4  # clock ticks (10 ms each) of CPU time without any progress


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    """Keep a rank from making progress while its connections stay open.

    Args:
        how: ``stop`` (SIGSTOP), ``gil`` (native code that never gives the interpreter lock back, so that no Python
            thread of the process runs) or ``spin`` (an endless loop in the training thread).
    """

    how: str = "stop"

    family: ClassVar[str] = "standstill"
    is_felt: ClassVar[bool] = True
    effect: ClassVar[str] = "one rank stops making progress; nothing tells the others"
    evidence: ClassVar[str] = (
        "the kernel reports it stopped; or its training thread sleeps while its control thread wants the interpreter "
        "lock in vain; or it burns CPU without progress"
    )
    stands_for: ClassVar[str] = "hangs without an error"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.HANG, incidents.GPU_PROCESSOR)
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    undo: ClassVar[str] = "a stopped process is continued, by the harness, or by its guard"

    @property
    def from_outside(self) -> bool:
        return self.how == "stop"

    @property
    def leads_to(self) -> frozenset[str]:
        return HUNG_CAUSES | ({"stopped"} if self.how == "stop" else set())

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")

    def inject(self, target: Target) -> None:
        if self.how == "stop":
            target.notes["undo"] = target.undo.plan(ContinueEntry(target.pid, target.ticks))
            target.signal(signal.SIGSTOP)
            target.pull("none")  # once continued, it goes on
        else:
            target.pull({"gil": "hold_gil", "spin": "spin"}[self.how])

    def observe(self, target: Target) -> str | None:
        return {"stop": _stopped, "gil": _silent, "spin": _spinning}[self.how](target)

    def clean_up(self, target: Target) -> bool:
        if self.how != "stop":
            return True
        if osprocess.is_stopped(target.pid, target.ticks):
            osprocess.kill_if_same(target.pid, target.ticks, signal.SIGCONT)
        left = osprocess.is_stopped(target.pid, target.ticks)
        if not left:
            target.notes["undo"].done()
        return not left


def _stopped(target: Target) -> str | None:
    if osprocess.is_stopped(target.pid, target.ticks):
        return f"pid {target.pid} is in state T (stopped)"
    if target.lost is not None and target.lost.cause == "stopped":
        return f"its parent: {target.lost.detail}"
    return None


def _silent(target: Target) -> str | None:
    """The training thread sleeps and has the interpreter lock; the control thread is awake, wants it, and is silent.

    Silence alone would be nothing: on a busy machine the control thread may have no CPU. Whoever waits for the lock
    wakes up again and again to ask for it, which the kernel counts; a thread without a CPU is not switched.
    """
    seen = _look(target) if target.reports else None  # before its report the worker has not begun
    if seen is None:
        return None
    now_s, (still, tries) = time.monotonic(), seen
    watch: _Watch | None = target.notes.get("watch")
    if watch is None or watch.still != still or target.pongs & set(watch.asked):
        first = 1 + max(watch.asked, default=watch.first - 1) if watch else 1
        watch = target.notes["watch"] = _Watch(now_s, still, tries, first)
    if len(watch.asked) < _QUESTIONS and now_s - watch.since_s >= len(watch.asked) * _ASK_S:
        with contextlib.suppress(OSError):  # nobody carries it: the run is over, or its coordinator gone
            target.ping(watch.first + len(watch.asked))
            watch.asked.append(watch.first + len(watch.asked))
    silent_s = now_s - watch.since_s
    if len(watch.asked) < _QUESTIONS or silent_s < _SILENT_S or tries - watch.tries < _TRIES:
        return None
    return (
        f"thread {target.tid} of pid {target.pid} slept for {silent_s * 1000:.0f} ms without a context switch, and its "
        f"control thread answered none of {len(watch.asked)} questions: it woke up {tries - watch.tries} times in vain"
    )


@dataclass
class _Watch:
    """Since when the training thread has not moved, and what was asked of the control thread since."""

    since_s: float
    still: tuple[int, int]  # the training thread's context switches and clock ticks of CPU time
    tries: int  # the control thread's context switches at the beginning
    first: int  # number of the first question
    asked: list[int] = field(default_factory=list)


def _look(target: Target) -> tuple[tuple[int, int], int] | None:
    """What the kernel counts for the training thread and for the control thread; None unless the first one sleeps."""
    control = next((tid for tid, name in osprocess.threads(target.pid).items() if name == _CONTROL), None)
    if control is None or osprocess.thread_state(target.pid, target.tid) != "S":
        return None
    switches, ticks = osprocess.switches(target.pid, target.tid), osprocess.cpu_ticks(target.pid, target.tid)
    tries = osprocess.switches(target.pid, control)
    return None if switches is None or ticks is None or tries is None else ((switches, ticks), tries)


def _spinning(target: Target) -> str | None:
    """The training thread burns CPU time, and the progress board does not change."""
    ticks = osprocess.cpu_ticks(target.pid, target.tid)
    if ticks is None:
        return None
    first = target.notes.setdefault("cpu_ticks", ticks)
    if ticks - first < _SPINNING_TICKS or target.beat is None:
        return None
    _, beat = target.beat
    if beat.step != target.step or beat.age_ms < 20:
        return None
    used_ms = (ticks - first) * 10
    return f"thread {target.tid} used {used_ms} ms of CPU, step and phase unchanged for {beat.age_ms:.0f} ms"
