"""The clocks of a node: does the kernel hold its wall clock to be right, does it jump, how fast does it run."""

from __future__ import annotations

import ctypes
import time
from collections import deque

import msgspec

from chaoskit.health.finding import at_most, good, warned
from chaoskit.health.limits import Limits
from chaoskit.messages import ClockOffset, Finding

_STA_UNSYNC = 0x0040
_TIME_ERROR = 5
_PPM = 65536  # adjtimex(2) counts in 2**-16 ppm
_LOOK_S = 0.02

_NTP = "start an NTP client (chrony, systemd-timesyncd) and let it reach its servers"


class _Timex(ctypes.Structure):
    """``struct timex`` of <sys/timex.h>; the tail is what is not looked at, and what may be added."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("tail", ctypes.c_byte * 256),
    )


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: the kernel does not tell.

    ``error_ms``: as the kernel estimates it. ``frequency_ppm``: the correction of the oscillator. ``step_ms``: by which
    the wall clock has moved more than the monotonic one while it was watched: it was set.
    """

    synchronised: bool | None
    error_ms: float | None
    frequency_ppm: float | None
    step_ms: float


def read(watch_s: float = _LOOK_S) -> ClockReading:
    """Ask the kernel, and watch both clocks for a moment."""
    step_ms = _step_ms(watch_s)
    state, timex = ask_kernel()
    if state < 0:
        return ClockReading(synchronised=None, error_ms=None, frequency_ppm=None, step_ms=step_ms)
    return ClockReading(
        synchronised=not timex.status & _STA_UNSYNC and state != _TIME_ERROR,
        error_ms=timex.esterror / 1e3,
        frequency_ppm=timex.freq / _PPM,
        step_ms=step_ms,
    )


def ask_kernel() -> tuple[int, _Timex]:
    """State of the clock and what belongs to it, by adjtimex(2), setting nothing; -1 where that is not allowed."""
    timex = _Timex()
    adjtimex = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    return adjtimex(ctypes.byref(timex)) if adjtimex is not None else -1, timex


def _step_ms(watch_s: float) -> float:
    before_ns = apart_ns()
    time.sleep(watch_s)
    return abs(apart_ns() - before_ns) / 1e6


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
    found = [at_most("clock.step_ms", reading.step_ms, warn=limits.clock_step_warn_ms, remedy="see who sets the clock")]
    if reading.synchronised is None:
        return [*found, good("clock.synchronised", "unknown", "the kernel does not tell")]
    if not reading.synchronised:
        return [*found, warned("clock.synchronised", "no", _NTP)]
    found.append(good("clock.synchronised", "yes"))
    if reading.error_ms is not None:
        found.append(at_most("clock.error_ms", reading.error_ms, warn=limits.clock_error_warn_ms, remedy=_NTP))
    if reading.frequency_ppm is not None:
        warn, remedy = limits.clock_frequency_warn_ppm, "the oscillator is close to what NTP can correct: replace it"
        found.append(at_most("clock.frequency_ppm", abs(reading.frequency_ppm), warn=warn, remedy=remedy))
    return found
