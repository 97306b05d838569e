"""A process that lives and does not move."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault, found
from chaoskit.faults.evidence import Evidence, ProcessStopped, ThreadStuck
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.processes.signals import continued_afterwards
from chaoskit.faults.target import Target
from chaoskit.vocabulary import HUNG_CAUSES

HOWS = ("stop", "gil", "spin")

_LISTENING = "ck-inject"  # name of the thread that answers
_ASK_S = 0.01
_QUESTIONS = 3
_SILENT_S = 0.06  # a healthy listening thread answers within a few milliseconds
_TRIES = 10  # context switches; a thread that waits for the interpreter lock tries every 0.5 ms
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
        "the kernel reports it stopped; or its training thread sleeps while its listening thread wants the interpreter "
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

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        if self.how == "gil":
            target.act("hold_gil")
            yield await _silent(target)
        elif self.how == "spin":
            target.act("spin")
            yield await _spinning(target)
        else:
            with continued_afterwards(target, [target.process]):
                target.signal(signal.SIGSTOP)
                target.release()  # once continued, it goes on
                yield await _stopped(target)
                await target.until_end()


async def _stopped(target: Target) -> ProcessStopped:
    def look() -> ProcessStopped | None:
        if target.process.is_stopped():
            seen = f"pid {target.pid} is in state T (stopped)"
            return ProcessStopped(subject=target.rank_process, source="the kernel", seen=seen)
        if target.lost is not None and target.lost.cause == "stopped":
            seen = f"its parent: {target.lost.detail}"
            return ProcessStopped(subject=target.rank_process, source="its agent", seen=seen)
        return None

    return found(await target.seen(look))


async def _silent(target: Target) -> ThreadStuck:
    """The training thread sleeps and has the interpreter lock; the one that listens is awake, wants it, and is silent.

    Silence alone would be nothing: on a busy machine the listening thread may have no CPU. A thread that waits for the
    lock wakes up again and again to ask for it, which the kernel counts; a thread without a CPU is not switched.
    """
    watch: _Watch | None = None

    def look() -> ThreadStuck | None:
        nonlocal watch
        seen = _look(target)
        if seen is None:
            return None
        now_s, (still, tries) = time.monotonic(), seen
        if watch is None or watch.still != still or target.pongs & set(watch.asked):
            first = 1 + max(watch.asked, default=watch.first - 1) if watch else 1
            watch = _Watch(now_s, still, tries, first)
        if len(watch.asked) < _QUESTIONS and now_s - watch.since_s >= len(watch.asked) * _ASK_S:
            number = watch.first + len(watch.asked)
            if target.ask_thread(number):  # else its line is gone, and nothing carries the question
                watch.asked.append(number)
        silent_s, woken = now_s - watch.since_s, tries - watch.tries
        if len(watch.asked) < _QUESTIONS or silent_s < _SILENT_S or woken < _TRIES:
            return None
        told = (
            f"thread {target.tid} of pid {target.pid} slept for {silent_s * 1000:.0f} ms without a context switch, and "
            f"the thread that listens answered none of {len(watch.asked)} questions: it woke up {woken} times in vain"
        )
        return ThreadStuck(
            subject=target.rank_process,
            source="the kernel's counts of its threads",
            tid=target.tid,
            seen=told,
        )

    await target.heard(lambda: target.reports)  # before its report the worker has not begun
    return found(await target.seen(look))


@dataclass
class _Watch:
    """Since when the training thread has not moved, and what was asked of the listening thread since."""

    since_s: float
    still: tuple[int, int]  # the training thread's context switches and clock ticks of CPU time
    tries: int  # the listening thread's context switches at the beginning
    first: int  # number of the first question
    asked: list[int] = field(default_factory=list)


def _look(target: Target) -> tuple[tuple[int, int], int] | None:
    """What the kernel counts for the training thread and for the listening thread; None unless the first one sleeps."""
    threads = target.process.threads()
    training, listening = (
        threads.get(target.tid),
        next((one for one in threads.values() if one.name == _LISTENING), None),
    )
    if training is None or listening is None or training.state != "S":
        return None
    return (training.switches, training.cpu_ticks), listening.switches


async def _spinning(target: Target) -> ThreadStuck:
    """The training thread burns CPU time, and the progress board does not change."""
    first = target.process.threads().get(target.tid)

    def look() -> ThreadStuck | None:
        thread, beat = target.process.threads().get(target.tid), target.beat
        if thread is None or first is None or beat is None:
            return None
        if (used_ticks := thread.cpu_ticks - first.cpu_ticks) < _SPINNING_TICKS:
            return None
        if beat.step != target.step or beat.age_ms < 20:
            return None
        told = f"thread {target.tid} used {used_ticks * 10} ms of CPU, step and phase unchanged for {beat.age_ms:.0f} ms"
        return ThreadStuck(
            subject=target.rank_process,
            source="the kernel, and its progress board",
            tid=target.tid,
            seen=told,
        )

    return found(await target.seen(look))
