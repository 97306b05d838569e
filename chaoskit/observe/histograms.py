"""Histograms of durations in the form of Prometheus, and those of recoveries.

-> observe/metrics.py serves them. sla/export.py: alerts, whose limits must equal a bound here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from chaoskit.runlog.account.setback import Setback
from chaoskit.vocabulary import RECOVERY_PHASES

STEP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PHASE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """A histogram of durations.

    Args:
        bounds_s: the upper bounds of its buckets, in seconds.

    Attributes:
        sum_ns: the sum of all durations. It is an integer, so that parts add up exactly to their
            whole.
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s, self._counts = bounds_s, [0] * (len(bounds_s) + 1)
        self.sum_ns = 0

    def observe(self, duration_ns: int) -> None:
        """Count a duration."""
        self._counts[bisect_left(self._bounds_s, duration_ns / 1e9)] += 1
        self.sum_ns += duration_ns

    @property
    def sum_s(self) -> float:
        """The sum of all durations in seconds."""
        return self.sum_ns / 1e9

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound with the number of durations up to it, cumulative.

        The last bound is ``+Inf``.
        """
        total, buckets = 0, []
        for bound_s, count in zip((*self._bounds_s, math.inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if math.isinf(bound_s) else str(bound_s), float(total)))
        return buckets


@dataclass(slots=True)
class RecoveryTimes:
    """The durations of recoveries, in total and by phase.

    A duration that was counted never changes.

    Attributes:
        total: durations from the fault to the first good step, the sum of the phases up to there.
        phases: the durations of each phase.
        resizes: the number of planned changes of the world.
    """

    total: Histogram = field(default_factory=lambda: Histogram(_PHASE_BUCKETS_S))
    phases: dict[str, Histogram] = field(default_factory=dict)
    resizes: int = 0
    _unfinished: list[tuple[Setback, set[str]]] = field(
        default_factory=list
    )  # recoveries with later phases to come, each with the phases that were counted

    def observe(self, setback: Setback) -> None:
        """Count a setback from which training goes on: its phases up to the first good step.

        Their sum is counted, too. A planned resize only raises ``resizes``. Later phases are
        counted by :meth:`count_later_phases`.
        """
        if setback.planned:
            self.resizes += 1
            return
        counted: set[str] = set()
        self._count_phases(setback, counted)
        good_ns = setback.good_ns
        if good_ns is not None:
            self.total.observe(good_ns - setback.begun_ns)
        self._unfinished.append((setback, counted))

    def count_later_phases(self) -> None:
        """Count later phases of recoveries that have ended since."""
        for setback, counted in self._unfinished:
            self._count_phases(setback, counted)
        self._unfinished = [
            recovery for recovery in self._unfinished if RECOVERY_PHASES[-1] not in recovery[1]
        ]

    def _count_phases(self, setback: Setback, counted: set[str]) -> None:
        """Count the phases of a recovery that are not counted yet."""
        for phase, begin_ns, end_ns in setback.spans():
            if phase not in counted:
                counted.add(phase)
                self.phases.setdefault(phase, Histogram(_PHASE_BUCKETS_S)).observe(
                    end_ns - begin_ns
                )
