"""The clock of a run, by which its journals tell the time: CLOCK_MONOTONIC of the process that drives it.

Processes of one machine share that clock; those of another machine have one of their own. What starts a process there
says how far the run's clock is ahead of it (:func:`set_ahead`), and everything that the process starts knows it, too.
Times that others see are the run's: in journals, and in messages whose field says so. Everything else is timed by the
machine's own clock.
"""

from __future__ import annotations

import os
import time

from chaoskit.process.linux import boot_id

#: Of the environment: nanoseconds, for processes that are not forked from one that knows.
VARIABLE = "CHAOSKIT_CLOCK_AHEAD_NS"
_ahead_ns = int(os.environ.get(VARIABLE, "0"))


def set_ahead(ahead_ns: int) -> None:
    """Say how far the run's clock is ahead of this machine's, for this process and all that it starts."""
    global _ahead_ns  # noqa: PLW0603 - there is one clock in a process
    _ahead_ns = ahead_ns
    os.environ[VARIABLE] = str(ahead_ns)


def to_run(own_ns: int) -> int:
    """A time of this machine's CLOCK_MONOTONIC on the run's clock."""
    return own_ns + _ahead_ns


def to_own(run_ns: int) -> int:
    """A time of the run's clock on this machine's CLOCK_MONOTONIC."""
    return run_ns - _ahead_ns


def heard_ns(run_ns: int) -> int:
    """When something happened that another machine tells of, on this machine's CLOCK_MONOTONIC.

    It is no later than now: what is known of that clock may be wrong by half of a round trip.
    """
    return min(to_own(run_ns), time.monotonic_ns())


def clock_id() -> str:
    """Equal on two processes exactly if they have the same CLOCK_MONOTONIC: the same boot, and the same namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without such namespaces
        namespace = ""
    return f"{boot_id()}/{namespace}"
