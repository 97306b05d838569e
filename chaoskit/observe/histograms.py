"""Counts of times by upper bound, as Prometheus wants them, and the times of recoveries in them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import RECOVERY_PHASES

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts durations.

    Args:
        bounds_s: upper bounds, in seconds.

    Attributes:
        sum_ns: of all that was observed: an integer, so that parts add up to their whole.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s, self._counts = bounds_s, [0] * (len(bounds_s) + 1)
        self.sum_ns = 0

    def observe(self, duration_ns: int) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_s, duration_ns / 1e9)] += 1
        self.sum_ns += duration_ns

    @property
    def sum_s(self) -> float:
        """Of all that was observed."""
        return self.sum_ns / 1e9

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and number of durations up to it, cumulative; the last bound is ``+Inf``."""
        total, found = 0, []
        for bound_s, count in zip((*self._bounds_s, math.inf), self._counts, strict=True):
            total += count
            found.append(("+Inf" if math.isinf(bound_s) else str(bound_s), float(total)))
        return found


@dataclass(slots=True)
class RecoveryTimes:
    """How long recoveries took, in all and by phase. What is observed once does not change any more.

    Attributes:
        total: from the fault to the first good step: the sum of its phases up to there.
        phases: by phase.
        resizes: planned changes of the world.
    """

    total: Histogram = field(default_factory=lambda: Histogram(_PHASE_BUCKETS_S))
    phases: dict[str, Histogram] = field(default_factory=dict)
    resizes: int = 0
    _healing: list[tuple[Setback, set[str]]] = field(
        default_factory=list
    )  # with the phases that were observed

    def observe(self, setback: Setback) -> None:
        """One that is settled: all phases up to the first good step, and their sum, by one reading."""
        if setback.planned:
            self.resizes += 1
            return
        seen: set[str] = set()
        self._observe(setback, seen)
        good_ns = setback.good_ns
        if good_ns is not None:
            self.total.observe(good_ns - setback.begun_ns)
        self._healing.append((setback, seen))

    def look(self) -> None:
        """Later phases of recoveries may be over by now."""
        for setback, seen in self._healing:
            self._observe(setback, seen)
        self._healing = [one for one in self._healing if RECOVERY_PHASES[-1] not in one[1]]

    def _observe(self, setback: Setback, seen: set[str]) -> None:
        for phase, begin_ns, end_ns in setback.spans():
            if phase not in seen:
                seen.add(phase)
                self.phases.setdefault(phase, Histogram(_PHASE_BUCKETS_S)).observe(
                    end_ns - begin_ns
                )
