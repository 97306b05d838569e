"""A jump of the wall clock of one process.

-> faults/processes/clock.py orders it. coordinator/detectors/clocks.py: a clock that is off.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import sys
import time
from typing import Any, TypeAlias

from chaoskit.runtime.injection.context import InjectionContext

_SLACK_S = 1.0  # between two readings of two clocks on a busy machine

_libc = ctypes.CDLL(None, use_errno=True)
_time, _time_ns = time.time, time.time_ns
_offset_ns = 0  # the clock of this process has jumped by this


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def kernel_clock_s() -> float:
    """Return CLOCK_REALTIME in seconds, read from the kernel without Python's ``time`` module."""
    now = _Timespec()
    _libc.clock_gettime(time.CLOCK_REALTIME, ctypes.byref(now))
    return float(now.seconds) + float(now.nanoseconds) / 1e9


def _jumped_time() -> float:
    """Return ``time.time()`` after the jump."""
    return _time() + _offset_ns / 1e9


def _jumped_time_ns() -> int:
    """Return ``time.time_ns()`` after the jump."""
    return _time_ns() + _offset_ns


_Datetime: TypeAlias = dt.datetime


class _Like(type):
    """A metaclass for which every datetime is an instance, including those made before the jump."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Datetime)


class _JumpedDatetime(_Datetime, metaclass=_Like):
    """The class ``datetime.datetime`` with the clock that jumped."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:
        return _Datetime.fromtimestamp(_jumped_time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _Datetime.fromtimestamp(_jumped_time(), dt.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return _Datetime.fromtimestamp(_jumped_time())


def jump(context: InjectionContext, options: dict[str, Any]) -> None:
    """Move this process's wall clock ahead by ``seconds``, in Python's ``time`` and ``datetime``.

    A negative number moves it back. Monotonic clocks are not touched. Several jumps add up. The
    report has the distance to the kernel's clock.
    """
    global _offset_ns  # noqa: PLW0603 - there is one clock a process
    _offset_ns += round(options["seconds"] * 1e9)
    _rebind(
        {id(_time): _jumped_time, id(_time_ns): _jumped_time_ns, id(_Datetime): _JumpedDatetime}
    )
    ahead_s = [
        time.time() - kernel_clock_s(),
        dt.datetime.now(dt.UTC).timestamp() - kernel_clock_s(),
    ]
    effective = all(abs(shown_s - _offset_ns / 1e9) < _SLACK_S for shown_s in ahead_s)
    observed = f"time.time() is {ahead_s[0]:+.3f} s and datetime.now() {ahead_s[1]:+.3f} s off the kernel's CLOCK_REALTIME"
    context.report(effective, observed)


def _rebind(replacements: dict[int, Any]) -> None:
    """Replace objects, given by identity, in every module that has a name for them."""
    this_module = sys.modules[__name__]
    for module in list(sys.modules.values()):
        for name, held in list(getattr(module, "__dict__", {}).items()):
            if id(held) in replacements and module is not this_module:
                setattr(module, name, replacements[id(held)])
