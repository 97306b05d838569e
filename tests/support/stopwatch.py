"""A watch beside a test that tells whether the machine was busy, by what the kernel counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from chaoskit.journal import Record

#: Properties of a result: the measured time, the stated time, and why it could not be checked (else
#: "no").
TOOK, STATED, BUSY = "took_s", "stated_s", "busy"

_PERIOD_S = 0.01
_PRESSURE = Path("/proc/pressure/cpu")
_NS_PER_S = 1e9

#: A thread that sleeps wakes up within a millisecond or two. A thread that wakes up this late had
#: no CPU.
LATE_S = 0.05
#: Share of the time in which some process of the machine waited for a CPU. It is 0.3 on two cores
#: for a training that sleeps between its steps, and 0.9 or more with two spinning processes for
#: each core.
PRESSURE = 0.6
#: The shortest time over which the share is taken: a process that starts makes a peak of some
#: milliseconds.
SPAN_S = 0.5


class _Sample(NamedTuple):
    t_ns: int
    waited_ns: int  # pressure: some process waited for a CPU, in all
    late_s: float


class BusyWatch:
    """A thread that samples the machine every 10 ms, for as long as the context lasts.

    It reads the kernel's pressure (``/proc/pressure/cpu``, where the kernel has it), and measures
    how late it wakes up itself. A late wake-up also shows a hypervisor that gave the CPU to another
    machine.
    """

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="busy-watch", daemon=True)

    def __enter__(self) -> BusyWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        due_s = time.monotonic()
        while not self._over.is_set():
            now_s = time.monotonic()
            self._samples.append(_Sample(time.monotonic_ns(), _waited_ns(), now_s - due_s))
            due_s = time.monotonic() + _PERIOD_S
            time.sleep(_PERIOD_S)

    def pressure(self, since_ns: int, until_ns: int) -> float:
        """Return the share of this time in which some process waited for a CPU; 0 if the kernel
        does not count it.
        """
        before = [sample for sample in self._samples if sample.t_ns <= since_ns] or self._samples[
            :1
        ]
        after = [sample for sample in self._samples if sample.t_ns >= until_ns] or self._samples[
            -1:
        ]
        span_ns = after[0].t_ns - before[-1].t_ns
        return (after[0].waited_ns - before[-1].waited_ns) / span_ns if span_ns > 0 else 0.0

    def latest_s(self, since_ns: int, until_ns: int) -> float:
        """Return the longest time for which the watch itself had no CPU in this time."""
        within = (
            sample
            for sample in self._samples
            if since_ns <= sample.t_ns <= until_ns + LATE_S * _NS_PER_S
        )
        return max((sample.late_s for sample in within), default=0.0)

    def busy(self, since_ns: int, until_ns: int) -> str:
        """Return why a time measured meanwhile is not valid, or "" if the machine was quiet."""
        share = self.pressure(min(since_ns, until_ns - int(SPAN_S * _NS_PER_S)), until_ns)
        if share > PRESSURE:
            return f"some process waited for a CPU for {share:.0%} of the time"
        late_s = self.latest_s(since_ns, until_ns)
        return f"a thread waited {late_s * 1000:.0f} ms for a CPU" if late_s > LATE_S else ""


class Stopwatch:
    """A stopwatch from one record of a journal to another, which notes whether the machine was busy
    meanwhile.
    """

    def __init__(self, watch: BusyWatch, tell: Callable[[str, object], None]) -> None:
        self._watch, self._tell = watch, tell

    def within(self, stated_s: float, since: Record, found: Record) -> None:
        """Assert that ``found`` follows ``since``, within the stated time unless the machine was
        busy.

        Raises:
            AssertionError: with both times.
        """
        took_s = (found.t_ns - since.t_ns) / 1e9
        busy = self._watch.busy(since.t_ns, found.t_ns)
        for name, value in ((TOOK, took_s), (STATED, stated_s), (BUSY, busy or "no")):
            self._tell(name, value)
        assert took_s > 0, f"{found.event} is {-took_s:.3f} s before {since.event}"
        assert busy or took_s <= stated_s, (
            f"{found.event} came after {took_s:.3f} s, stated are {stated_s:g} s"
        )

    def is_busy(self, since: Record, until: Record) -> bool:
        """Return whether the machine was busy between two records.

        If it was, the test result says so.
        """
        busy = self._watch.busy(since.t_ns, until.t_ns)
        self._tell(BUSY, busy or "no")
        return bool(busy)


def _waited_ns() -> int:
    try:
        return int(_PRESSURE.read_text().partition("total=")[2].split()[0]) * 1000
    except (OSError, IndexError, ValueError):
        return 0
