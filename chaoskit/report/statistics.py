"""Estimates of recovery from repeated experiments: its probability and its duration.

Pure arithmetic.

-> history/compare.py: comparison of two sets of runs. sla/exact.py: bounds on a share of runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from chaoskit.experiment.shrink.proportion import wilson_interval
from chaoskit.runlog.outcome import Outcome
from chaoskit.vocabulary import Verdict

_P95_LEAST = 20  # values; with fewer, the nearest rank is the maximum
#: The part of a test's name that the plugin adds for a repeat: ``[repeat3]``,
#: ``[forward-repeat3]``.
_REPEAT = re.compile(r"\[repeat\d+\]|-repeat\d+(?=[-\]])|(?<=\[)repeat\d+-")


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of recovery from runs with faults.

    A run recovered if its training went on after every incident, and ``assert_recovered`` did not
    deny it; see :attr:`Outcome.recovered`. Runs that failed for other reasons are counted in
    ``failed``.

    Three kinds of runs do not count, and have counters of their own. They are unknown runs, runs in
    which the harness broke, and runs whose test judges them itself (``check=False``). The last may
    be meant to fail.

    Attributes:
        name: the name of the experiment, without the number of a repeat.
        job: the job with its options; empty if the runs have several jobs.
        faults: the planned faults; empty if the runs have several plans.
        recovered: the number of runs that recovered.
        tried: the number of runs that count.
        probability: the fraction that recovered, from 0 to 1; None if no run counts.
        low: the lower end of its 95 % Wilson score interval; 0 if no run counts.
        high: the upper end of the interval; 1 if no run counts.
        failed: the number of runs that failed, or whose test failed, including runs that recovered.
        unknown: the number of runs that are unknown.
        errors: the number of runs in which the harness broke.
        unclaimed: the number of runs that their tests judge themselves.
        recoveries: the number of recoveries in runs that came back.
        p50_s: the median time from the injection to the first good step; None if there is none.
        p95_s: the 95 % quantile; None below 20 values, as it would be the maximum.
        max_s: the maximum; None if there is none. All quantiles are measured values (nearest rank).
    """

    name: str
    job: str = ""
    faults: list[str] = []
    recovered: int
    tried: int
    probability: float | None = None
    low: float
    high: float
    failed: int = 0
    unknown: int = 0
    errors: int = 0
    unclaimed: int = 0
    recoveries: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    max_s: float | None = None

    @property
    def runs(self) -> int:
        """The number of all runs of the experiment, including those that do not count."""
        return self.tried + self.unknown + self.errors + self.unclaimed


class Estimates(msgspec.Struct, frozen=True):
    """The estimates of a set of runs.

    Attributes:
        total: the estimate over all runs.
        experiments: an estimate for each group of repeats, in the order of their first runs.
    """

    total: Estimate
    experiments: list[Estimate]

    @property
    def repeated(self) -> list[Estimate]:
        """The experiments that were run more than once."""
        return [experiment for experiment in self.experiments if experiment.runs > 1]

    def plain(self) -> Any:
        """Return the estimates as values for a JSON encoder."""
        return msgspec.to_builtins(self)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of ``values`` do not exceed.

    It is always a measured value (nearest rank). ``share`` is a fraction from 0 to 1.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def estimate_recovery(outcomes: Iterable[Outcome]) -> Estimates:
    """Return estimates of the probability of recovery, over all outcomes and for each experiment.

    Runs without a fault are left out.
    """
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.faults:
            groups.setdefault(experiment_key(outcome), []).append(outcome)
    counted = [outcome for group in groups.values() for outcome in group]
    return Estimates(
        _estimate("all experiments", counted),
        [
            msgspec.structs.replace(
                _estimate(group_title(group), group),
                job=group[0].job,
                faults=[fault.fault for fault in group[0].faults],
            )
            for group in groups.values()
        ],
    )


def experiment_key(outcome: Outcome) -> tuple[object, ...]:
    """Return a key that is equal for runs of one experiment, which differ only in seed and name."""
    return (
        outcome.job,
        outcome.stack,
        outcome.substrate,
        outcome.nodes,
        outcome.spares,
        outcome.reduction,
        tuple(sorted((field, repr(setting)) for field, setting in outcome.settings.items())),
        tuple(fault.fault for fault in outcome.faults),
    )


def without_repeat(name: str) -> str:
    """Return the name of a test without the number of its repeat."""
    return _REPEAT.sub("", name)


def group_title(group: Sequence[Outcome]) -> str:
    """Return the name of the runs of an experiment, without the number of a repeat.

    If the runs have several names, the first one is followed by the number of the others.
    """
    first, *others = dict.fromkeys(without_repeat(outcome.name) for outcome in group)
    return f"{first} (and {len(others)} other names)" if others else first


def _estimate(name: str, outcomes: Sequence[Outcome]) -> Estimate:
    """Return the estimate of one group of runs."""
    eligible = [outcome for outcome in outcomes if outcome.claimed]
    counted = [outcome for outcome in eligible if outcome.recovered is not None]
    recovered, tried = sum(bool(outcome.recovered) for outcome in counted), len(counted)
    errors = sum(outcome.verdict is Verdict.ERROR for outcome in eligible)
    low, high = wilson_interval(recovered, tried)
    seconds = [
        recovery.seconds
        for outcome in counted
        if outcome.came_back
        for recovery in outcome.recoveries
    ]
    return Estimate(
        name=name,
        recovered=recovered,
        tried=tried,
        probability=recovered / tried if tried else None,
        low=low,
        high=high,
        failed=sum(outcome.result is Verdict.FAILED for outcome in eligible),
        unknown=len(eligible) - tried - errors,
        errors=errors,
        unclaimed=len(outcomes) - len(eligible),
        recoveries=len(seconds),
        p50_s=quantile(seconds, 0.5) if seconds else None,
        p95_s=quantile(seconds, 0.95) if len(seconds) >= _P95_LEAST else None,
        max_s=max(seconds, default=None),
    )
