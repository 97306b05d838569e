"""The wall clock of a node: whether it jumps, and how far it is from that of another node."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from chaoskit.health.finding import at_most
from chaoskit.health.limits import Limits
from chaoskit.wire.messages import ClockOffset, Finding

_LOOK_S = 0.02


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``step_ms``: how far the wall clock moved more than the monotonic one while it was watched: it was set."""

    step_ms: float


def read(watch_s: float = _LOOK_S) -> ClockReading:
    """Watch both clocks for a moment."""
    before_ns = apart_ns()
    time.sleep(watch_s)
    return ClockReading(step_ms=abs(apart_ns() - before_ns) / 1e6)


def apart_ns() -> int:
    """Wall clock less monotonic clock: of some attempts the one that took least, as one may lose the CPU between."""
    tries = []
    for _ in range(5):
        first_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        last_ns = time.monotonic_ns()
        tries.append((last_ns - first_ns, wall_ns - (first_ns + last_ns) // 2))
    return min(tries)[1]


def ahead_ms(theirs_ns: int, ours_ns: int, rtt_ns: int) -> float:
    """How far another wall clock is ahead, give or take half the round trip in which it was asked.

    Args:
        theirs_ns: it, as it answered. ours_ns: our wall clock when it was asked.
    """
    return (theirs_ns - ours_ns - rtt_ns / 2) / 1e6


class OffsetWindow:
    """Our wall clock beside another one, by the shortest of the last round trips. Pure."""

    def __init__(self, samples: int = 16) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=samples)

    def hear(self, theirs_ns: int, ours_ns: int, rtt_ns: int) -> None:
        """A round trip; as for :func:`ahead_ms`."""
        self._samples.append((rtt_ns, -ahead_ms(theirs_ns, ours_ns, rtt_ns)))

    @property
    def offset(self) -> ClockOffset | None:
        """How far ours is ahead; None before the first round trip."""
        if not self._samples:
            return None
        rtt_ns, ours_ahead_ms = min(self._samples)
        return ClockOffset(ours_ahead_ms, rtt_ns / 2e6)


def judge_offset(ahead_ms: float, limits: Limits, detail: str = "") -> Finding:
    """Of a wall clock in a run. Never a reason to keep a node out."""
    warn, remedy = limits.clock_offset_warn_ms, "let all nodes follow the same NTP servers"
    return at_most("clock.offset_ms", abs(ahead_ms), warn=warn, remedy=remedy, detail=detail)


def judge(reading: ClockReading, limits: Limits) -> list[Finding]:
    """A wrong wall clock is no reason to keep a node out: nothing is decided by it. It spoils what people compare."""
    warn, remedy = limits.clock_step_warn_ms, "find out what sets the clock"
    return [at_most("clock.step_ms", reading.step_ms, warn=warn, remedy=remedy)]
