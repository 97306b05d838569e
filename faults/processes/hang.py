"""Fault ``Hang``: a process stays alive and makes no progress.

-> runtime/injection/waiting.py holds the interpreter lock or spins, in the worker.
-> coordinator/detectors/hang.py: after which time such a rank is given up.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence, ProcessStopped, ThreadStuck
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.processes.signals import continued_afterwards
from chaoskit.faults.target import Target
from chaoskit.vocabulary import HUNG_CAUSES

HOWS = ("stop", "gil", "spin")

_LISTENING = "ck-inject"  # name of the thread that answers questions
_ASK_S = 0.01  # interval of the questions
_QUESTIONS = 3
_SILENT_S = 0.06  # a healthy listening thread answers within a few milliseconds
_TRIES = 10  # context switches; a thread that waits for the interpreter lock tries every 0.5 ms
_SPINNING_TICKS = 4  # clock ticks (10 ms each) of CPU time without any progress


@dataclass(frozen=True, kw_only=True)
class Hang(Fault):
    """Keep a rank from making progress while its connections stay open.

    Args:
        how: ``stop`` (SIGSTOP), ``gil`` (native code that never gives the interpreter lock back, so
            that no Python thread of the process runs) or ``spin`` (an endless loop in the training
            thread).
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
            yield await _silence_evidence(target)
        elif self.how == "spin":
            target.act("spin")
            yield await _spin_evidence(target)
        else:
            with continued_afterwards(target, [target.process]):
                target.signal(signal.SIGSTOP)
                target.release()  # a continued process must not wait at the hook
                yield await _stop_evidence(target)
                await target.until_end()


async def _stop_evidence(target: Target) -> ProcessStopped:
    """Wait until the kernel or the agent reports the process stopped, and return evidence of it."""

    def look() -> ProcessStopped | None:
        if target.process.is_stopped():
            words = f"pid {target.pid} is in state T (stopped)"
            return ProcessStopped(subject=target.rank_process, source="the kernel", seen=words)
        if target.lost is not None and target.lost.cause == "stopped":
            words = f"its parent: {target.lost.detail}"
            return ProcessStopped(subject=target.rank_process, source="its agent", seen=words)
        return None

    return await target.seen(look)


async def _silence_evidence(target: Target) -> ThreadStuck:
    """Wait until the training thread sleeps with the interpreter lock and no thread answers.

    Return evidence of it. It does not return if the run ends first.

    Silence alone is no evidence: on a busy machine the listening thread may have no CPU. A thread
    that waits for the lock wakes up again and again to ask for it, which the kernel counts; a
    thread without a CPU is not switched.
    """
    watch: _Watch | None = None

    def look() -> ThreadStuck | None:
        nonlocal watch
        counts = _thread_counts(target)
        if counts is None:
            return None
        now_s, (training, listening_switches) = time.monotonic(), counts
        if watch is None or watch.training != training or target.pongs & set(watch.asked):
            first_question = 1 + max(watch.asked, default=watch.first_question - 1) if watch else 1
            watch = _Watch(now_s, training, listening_switches, first_question)
        if len(watch.asked) < _QUESTIONS and now_s - watch.since_s >= len(watch.asked) * _ASK_S:
            question = watch.first_question + len(watch.asked)
            if target.ask_thread(question):  # otherwise its connection is lost
                watch.asked.append(question)
        silent_s = now_s - watch.since_s
        wakeups = listening_switches - watch.listening_switches
        if len(watch.asked) < _QUESTIONS or silent_s < _SILENT_S or wakeups < _TRIES:
            return None
        words = (
            f"thread {target.tid} of pid {target.pid} slept for {silent_s * 1000:.0f} ms without a context switch, and "
            f"the thread that listens answered none of {len(watch.asked)} questions: it woke up {wakeups} times in vain"
        )
        return ThreadStuck(
            subject=target.rank_process,
            source="the kernel's counts of its threads",
            tid=target.tid,
            seen=words,
        )

    await target.heard(lambda: target.reports)  # the worker begins with its report
    return await target.seen(look)


@dataclass
class _Watch:
    """State of a watch on a training thread that does not move."""

    since_s: float  # the training thread has not moved since then
    training: tuple[int, int]  # the training thread's context switches and clock ticks of CPU time
    listening_switches: int  # the listening thread's context switches at the beginning
    first_question: int  # its number
    asked: list[int] = field(default_factory=list)  # numbers of the questions asked since then


def _thread_counts(target: Target) -> tuple[tuple[int, int], int] | None:
    """Return the kernel's counts for the training thread and the listening thread.

    These are context switches and clock ticks of the first, and context switches of the second.
    Return None unless both threads exist and the training thread sleeps.
    """
    threads = target.process.threads()
    training, listening = (
        threads.get(target.tid),
        next((thread for thread in threads.values() if thread.name == _LISTENING), None),
    )
    if training is None or listening is None or training.state != "S":
        return None
    return (training.switches, training.cpu_ticks), listening.switches


async def _spin_evidence(target: Target) -> ThreadStuck:
    """Wait until the training thread burns CPU time while the progress board does not change.

    Return evidence of it. It does not return if the run ends first.
    """
    thread_before = target.process.threads().get(target.tid)

    def look() -> ThreadStuck | None:
        thread, beat = target.process.threads().get(target.tid), target.beat
        if thread is None or thread_before is None or beat is None:
            return None
        if (used_ticks := thread.cpu_ticks - thread_before.cpu_ticks) < _SPINNING_TICKS:
            return None
        if beat.step != target.step or beat.age_ms < 20:
            return None
        words = f"thread {target.tid} used {used_ticks * 10} ms of CPU, step and phase unchanged for {beat.age_ms:.0f} ms"
        return ThreadStuck(
            subject=target.rank_process,
            source="the kernel, and its progress board",
            tid=target.tid,
            seen=words,
        )

    return await target.seen(look)
