"""The stopwatch fails a late record on a quiet machine, and reports a busy machine."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.busy import load
from support.stopwatch import BUSY, SPAN_S, STATED, TOOK, BusyWatch, Stopwatch
from support.waiting import wait_until

from chaoskit.journal import Record


def record(t_ns: int) -> Record:
    return Record(t_ns=t_ns, source="test", event="event", fields={})


def test_what_is_late_fails_unless_the_machine_is_busy() -> None:
    """The error has the time of a late record, and both times are properties of the result."""
    properties: dict[str, Any] = {}
    begun_ns = time.monotonic_ns()
    with BusyWatch() as watch:
        wait_until(lambda: time.monotonic_ns() - begun_ns > 1e9, "a second has passed")
        now_ns = time.monotonic_ns()
    watched = Stopwatch(watch, properties.__setitem__)
    if not watch.busy(begun_ns, now_ns):
        with pytest.raises(AssertionError, match=r"event came after 0\.900 s, stated are 0\.5 s"):
            watched.within(0.5, record(now_ns - 900_000_000), record(now_ns))
        assert properties == {TOOK: 0.9, STATED: 0.5, BUSY: "no"}
    watched.within(0.95, record(now_ns - 900_000_000), record(now_ns))


def test_a_loaded_machine_is_busy_and_still_shows_the_order() -> None:
    """A record before its cause always fails, and no time is checked on a busy machine."""
    properties: dict[str, Any] = {}
    with BusyWatch() as watch, load():
        span_ns = int(SPAN_S * 1e9)
        now_ns = wait_until(
            lambda: (now := time.monotonic_ns()) and watch.busy(now - span_ns, now) and now,
            "the load is seen",
        )
    watched = Stopwatch(watch, properties.__setitem__)
    watched.within(0.0001, record(now_ns - span_ns), record(now_ns))
    assert properties[BUSY] != "no"
    with pytest.raises(AssertionError, match=r"event is 0\.500 s before event"):
        watched.within(10.0, record(now_ns), record(now_ns - span_ns))
