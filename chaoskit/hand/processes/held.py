"""Effects on a process: a stop, and a duty cycle of stops.

Both end by themselves when this process ends: the kernel lets go what a dead process traces.

-> ``hand/processes/operations.py`` begins them; ``hand/processes/tracer.py`` stops threads.
"""

from __future__ import annotations

import time
from typing import Any

from ..effects import LastingEffect
from ..refusals import ProcessGone, Unable
from . import proc
from .duty_cycle import DutyCycle
from .proc import Look
from .tracer import HeldProcess, Tracer

_GONE = "gone"
#: Time for the threads of a process to stop, before the answer; the usual time is a few ms.
_STOP_WITHIN_S = 0.2
_NO_LOOK = Look("X", True, 0, 0, {})


class Stop(LastingEffect):
    """A process whose threads are all stopped.

    Raises:
        ProcessGone: if the process has ended, or ``pid`` is another one.
        Unable: if the kernel does not allow it.
    """

    kind = "stop"

    def __init__(self, tracer: Tracer, pid: int, ticks: int) -> None:
        self.pid, self._tracer = pid, tracer
        began_s = time.monotonic()
        self._held: HeldProcess | None = tracer.hold(pid, ticks, _STOP_WITHIN_S)
        self._stopped_s = time.monotonic()
        self.took_ms = round(1000 * (self._stopped_s - began_s), 2)
        self._is_complete = False
        self._first = _NO_LOOK
        self._complete(self._held)

    def act(self, now_s: float) -> str:
        """Take in late stops and ends of threads."""
        self._tracer.collect()
        if self._held is None or self._held.is_gone:
            return _GONE
        self._complete(self._held)
        return ""

    def evidence(self) -> dict[str, Any]:
        """Return the threads, their states, and how far their counters have grown.

        ``held`` is true if all threads are stopped, and no counter has grown since the last of
        them stopped.
        """
        held, now = self._held, proc.look(self.pid) or _NO_LOOK
        if held is None or held.is_gone:
            return {"lasted_s": self._lasted_s(), "held": False, "gone": True}
        cpu_ticks_grown = now.cpu_ticks - self._first.cpu_ticks
        switches_grown = now.switches - self._first.switches
        thread_count = sum(now.states.values())
        return {
            "lasted_s": self._lasted_s(),
            "threads": thread_count,
            "stopped": len(held.signals),
            "states": now.states,
            "cpu_ticks_grown": cpu_ticks_grown,
            "switches_grown": switches_grown,
            "held": thread_count == len(held.signals) == now.states.get("t", 0)
            and cpu_ticks_grown == 0 == switches_grown,
        }

    def end(self) -> dict[str, Any]:
        """Let the process go on, and return the signs of the stop until then."""
        if self._held is None:
            return {}
        self._tracer.collect()
        evidence = self.evidence()
        self._tracer.let_go(self._held)
        self._held = None
        return evidence

    def _complete(self, held: HeldProcess) -> None:
        """Look at the process as soon as all its threads are stopped, for later comparisons."""
        if not self._is_complete:
            self._is_complete = not held.pending
            self._tracer.settle(held)
            self._first = proc.look(self.pid) or _NO_LOOK

    def _lasted_s(self) -> float:
        return round(time.monotonic() - self._stopped_s, 3)


class Throttle(LastingEffect):
    """A process that runs only for a share of the time, as its threads are stopped again and again.

    Args:
        share: share of the time in which the process runs, above 0 and below 1.
        period_s: time from a stop to the next, in seconds.

    Raises:
        ProcessGone: if the process has ended, or ``pid`` is another one.
        Unable: if the kernel does not allow it.
    """

    kind = "throttle"

    def __init__(self, tracer: Tracer, pid: int, ticks: int, share: float, period_s: float) -> None:
        self.pid, self._ticks, self._tracer = pid, ticks, tracer
        self._share = share
        self._stop_within_s = min(_STOP_WITHIN_S, (1 - share) * period_s / 2)
        stat = proc.same_process(pid, ticks)
        self._first_cpu_ticks = 0 if stat is None else stat.cpu_ticks
        self._began_s = time.monotonic()
        self._cycle = DutyCycle(share, period_s, self._began_s)
        self._held: HeldProcess | None = None
        self._stop()

    def next_act_s(self) -> float:
        """Return the time of the next stop or its end."""
        return self._cycle.next_s

    def act(self, now_s: float) -> str:
        """Stop the process or let it go on, as its cycle wants."""
        self._tracer.collect()
        if self._held is not None and self._held.is_gone:
            return _GONE
        if now_s < self._cycle.next_s:
            return ""
        if self._held is not None:
            self._let_go()
            return ""
        try:
            self._stop()
        except ProcessGone:
            return _GONE
        except Unable as refusal:
            return refusal.reason
        return ""

    def evidence(self) -> dict[str, Any]:
        """Return the measured share of the time, and the CPU time that the process has used."""
        now_s, stat = time.monotonic(), proc.same_process(self.pid, self._ticks)
        cpu_ticks = None if stat is None else stat.cpu_ticks - self._first_cpu_ticks
        return {
            "lasted_s": round(now_s - self._began_s, 3),
            "share": self._share,
            "running_share": round(self._cycle.running_share(now_s), 4),
            "stopped_s": round(self._cycle.stopped_s(now_s), 3),
            "stops": self._cycle.stop_count,
            "cpu_ticks": cpu_ticks,
        }

    def end(self) -> dict[str, Any]:
        """Let the process go on, and return the signs of the cycle."""
        if self._held is not None:
            self._let_go()
        return self.evidence()

    def _stop(self) -> None:
        self._held = self._tracer.hold(self.pid, self._ticks, self._stop_within_s)
        self._cycle.stop(time.monotonic())

    def _let_go(self) -> None:
        if self._held is not None:
            self._tracer.let_go(self._held)
            self._held = None
            self._cycle.let_go(time.monotonic())
