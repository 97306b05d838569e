"""Wall clock of a node: its jumps, and its offset against the clock of another node.

-> ``agent/coordinator_link.py``: measures the offset of a node during a run.
-> ``coordinator/detectors/clocks.py``: judges the offsets of nodes and workers.
-> ``health/pair.py``: measures one in a test of two nodes.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from chaoskit.health.finding import at_most
from chaoskit.health.limits import HealthLimits
from chaoskit.wire.messages import ClockOffset, Finding

_LOOK_S = 0.02


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reading of the clocks.

    Attributes:
        step_ms: jump of the wall clock against the monotonic one while both were watched, without
            a sign. A large one shows that the wall clock was set.
    """

    step_ms: float


def read(watch_s: float = _LOOK_S) -> ClockReading:
    """Watch both clocks for ``watch_s``, and return how far the wall clock jumped.

    It sleeps meanwhile.
    """
    before_ns = apart_ns()
    time.sleep(watch_s)
    return ClockReading(step_ms=abs(apart_ns() - before_ns) / 1e6)


def apart_ns() -> int:
    """Return the wall clock less the monotonic clock, in nanoseconds.

    The fastest of five attempts counts, since the process may lose the CPU between the two
    readings.
    """
    attempts = []
    for _ in range(5):
        first_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        last_ns = time.monotonic_ns()
        attempts.append((last_ns - first_ns, wall_ns - (first_ns + last_ns) // 2))
    return min(attempts)[1]


def ahead_ms(other_wall_ns: int, own_wall_ns: int, rtt_ns: int) -> float:
    """Return how far another wall clock is ahead of this one in ms, negative if it is behind.

    The result is exact to half the round trip.

    Args:
        other_wall_ns: the other wall clock when it answered.
        own_wall_ns: the wall clock of this process when it asked.
        rtt_ns: round trip of question and answer.
    """
    return (other_wall_ns - own_wall_ns - rtt_ns / 2) / 1e6


class OffsetWindow:
    """Offset of the own wall clock from another, by the shortest of the last round trips. Pure.

    Args:
        samples: number of round trips that are remembered.
    """

    def __init__(self, samples: int = 16) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=samples)

    def hear(self, other_wall_ns: int, own_wall_ns: int, rtt_ns: int) -> None:
        """Add a round trip, with the arguments of :func:`ahead_ms`."""
        self._samples.append((rtt_ns, -ahead_ms(other_wall_ns, own_wall_ns, rtt_ns)))

    @property
    def offset(self) -> ClockOffset | None:
        """The offset of the own clock, positive if it is ahead; None before the first round trip.

        Its uncertainty is half the round trip.
        """
        if not self._samples:
            return None
        rtt_ns, own_ahead_ms = min(self._samples)
        return ClockOffset(own_ahead_ms, rtt_ns / 2e6)


def judge_offset(ahead_ms: float, limits: HealthLimits, detail: str = "") -> Finding:
    """Return the finding on the wall clock of a node in a run, which is a warning at most.

    Args:
        ahead_ms: offset from the coordinator's clock, of either sign.
        limits: limits, of which ``clock_offset_warn_ms`` counts.
        detail: further text for people.
    """
    warn, remedy = limits.clock_offset_warn_ms, "synchronise all nodes with the same NTP servers"
    return at_most("clock.offset_ms", abs(ahead_ms), warn=warn, remedy=remedy, detail=detail)


def judge(reading: ClockReading, limits: HealthLimits) -> list[Finding]:
    """Return the findings on a reading.

    A wrong wall clock does not keep a node out, since no decision depends on it. It spoils
    comparisons by people.
    """
    warn, remedy = limits.clock_step_warn_ms, "find the process that sets the clock"
    return [at_most("clock.step_ms", reading.step_ms, warn=warn, remedy=remedy)]
