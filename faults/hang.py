"""A process that lives and does not move."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit import osprocess
from chaoskit.errors import BadInput
from faults import incidents
from faults.base import Fault, Target
from faults.incidents import Incident

HOWS = ("stop", "gil", "spin")

_ASK_S = 0.01
_SILENT_S = 0.06  # a healthy control thread answers within a few milliseconds
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
    effect: ClassVar[str] = "one rank stops making progress; nothing tells the others"
    evidence: ClassVar[str] = (
        "the kernel reports it stopped, its control thread is silent, or it burns CPU without progress"
    )
    stands_for: ClassVar[str] = "hangs without an error"
    counted: ClassVar[tuple[Incident, ...]] = (incidents.HANG, incidents.GPU_PROCESSOR)
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"how": how} for how in HOWS)
    undo: ClassVar[str] = "a stopped process is continued, by the harness or by `chaoskit janitor`"

    @property
    def from_outside(self) -> bool:
        return self.how == "stop"

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.how not in HOWS:
            raise BadInput("how", self.how, f"use one of {', '.join(HOWS)}")

    def inject(self, target: Target) -> None:
        if self.how == "stop":
            target.notes["undo"] = target.undo.plan("continue", pid=target.pid, ticks=target.ticks)
            target.signal(signal.SIGSTOP)
            target.pull("none")  # once continued, it goes on
        else:
            target.pull({"gil": "hold_gil", "spin": "spin"}[self.how])

    def observe(self, target: Target) -> str | None:
        return {"stop": _stopped, "gil": _silent, "spin": _spinning}[self.how](target)

    def clean_up(self, target: Target) -> bool:
        if self.how != "stop":
            return True
        if osprocess.state(target.pid) == "T":
            osprocess.kill_if_same(target.pid, target.ticks, signal.SIGCONT)
        left = osprocess.start_ticks(target.pid) == target.ticks and osprocess.state(target.pid) == "T"
        if not left:
            target.undo.done(target.notes["undo"])
        return not left


def _stopped(target: Target) -> str | None:
    if osprocess.state(target.pid) == "T":
        return f"pid {target.pid} is in state T (stopped)"
    if target.lost is not None and target.lost.cause == "stopped":
        return f"its parent: {target.lost.detail}"
    return None


def _silent(target: Target) -> str | None:
    """The process lives, its agent reports, and its control thread does not answer."""
    now_s = time.monotonic()
    number, asked_s = target.notes.get("asked", (0, target.injected_ns / 1e9))
    if number == 0 or number in target.pongs:  # the release may not have reached the main thread yet: ask again
        if now_s - asked_s > _ASK_S:
            with contextlib.suppress(OSError):  # nobody carries it: the run is over, or its coordinator gone
                target.ping(number + 1)
                target.notes["asked"] = (number + 1, now_s)
        return None
    given_up = target.lost is not None and target.lost.cause == "hung"  # after which nothing more can be seen of it
    silent_s = (target.lost.detected_ns / 1e9 if target.lost and given_up else now_s) - asked_s
    if silent_s < _SILENT_S or target.node_heard_s < asked_s:
        return None
    if osprocess.is_ending(target.pid) and not given_up:
        return None
    return f"pid {target.pid} lived, but its control thread did not answer for {silent_s * 1000:.0f} ms"


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
