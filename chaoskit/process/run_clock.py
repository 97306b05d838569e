"""The clock of a run: CLOCK_MONOTONIC of the process that drives it.

Processes of one machine share that clock; other machines have clocks of their own. A process that
is started there is given the offset of the run's clock (:func:`set_ahead`), and its children
inherit it. Times that other machines read are on the run's clock: in journals, and in message
fields that say so. Everything else is timed by the machine's own clock.

-> substrate/supervisor/programs.py gives a process the offset, which substrate/supervisor/client.py
measures. Wall clocks that are off: health/clock.py and coordinator/detectors/clocks.py.
"""

from __future__ import annotations

import os
import time

from chaoskit.process.linux import boot_id

#: Environment variable with the offset in nanoseconds, for processes that are not forked.
VARIABLE = "CHAOSKIT_CLOCK_AHEAD_NS"
_ahead_ns = int(os.environ.get(VARIABLE, "0"))


def set_ahead(ahead_ns: int) -> None:
    """Set how far the run's clock is ahead of this machine's, in nanoseconds.

    The offset holds for this process and its later children.
    """
    global _ahead_ns  # noqa: PLW0603 - there is one clock in a process
    _ahead_ns = ahead_ns
    os.environ[VARIABLE] = str(ahead_ns)


def to_run(own_ns: int) -> int:
    """Convert a time of this machine's CLOCK_MONOTONIC to the run's clock."""
    return own_ns + _ahead_ns


def to_own(run_ns: int) -> int:
    """Convert a time of the run's clock to this machine's CLOCK_MONOTONIC."""
    return run_ns - _ahead_ns


def heard_ns(run_ns: int) -> int:
    """Convert the time of a remote event to this machine's CLOCK_MONOTONIC.

    The result is never later than now: the offset may be wrong by half of a round trip.
    """
    return min(to_own(run_ns), time.monotonic_ns())


def clock_id() -> str:
    """Return an identity that is equal for two processes exactly if they share CLOCK_MONOTONIC.

    They share it if they have the same boot and the same time namespace.
    """
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel without time namespaces
        namespace = ""
    return f"{boot_id()}/{namespace}"
