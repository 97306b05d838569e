"""Two sets of runs beside each other: what got worse, what did not, and of what nothing can be said. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from math import inf

import msgspec

from chaoskit.history import record
from chaoskit.history.ranks import RatioEstimate, estimate_ratio, least_for
from chaoskit.history.record import Metric, RunRecord

#: How much longer something may take before it counts as worse.
TOLERANCE = 0.10
#: Of what has changed by chance alone, one in a hundred is called so.
CHANCE = 0.01
#: Seconds of two sessions are compared if steps took as long in both, but for this share.
CONTROL = 0.05


class Change(StrEnum):
    """What became of one number of one series."""

    REGRESSED = "regressed"
    BETTER = "better"
    UNCHANGED = "unchanged"
    UNDECIDED = "undecided"  # too few runs, or too unlike each other
    INCOMPARABLE = "incomparable"  # seconds of another machine, or of one that was not as fast
    NO_REFERENCE = "no reference"

    @property
    def is_open(self) -> bool:
        """Whether nothing was shown: it fails under ``--chaos-strict`` only."""
        return self in (Change.UNDECIDED, Change.INCOMPARABLE, Change.NO_REFERENCE)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One number of one series, before and now.

    Attributes:
        metric: such as ``recovery / step``. before, after: its median, or of what is counted the share of runs that
            missed it; None where there is none.
        ratio: how many times greater it is now; None for what is counted.
        reason: why nothing can be said, or what is worse.
    """

    series: str
    title: str
    metric: str
    unit: record.Unit
    change: Change
    before: float | None = None
    after: float | None = None
    ratio: RatioEstimate | None = None
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, series by series.

    Attributes:
        absent: titles of series of before that had no run now: they show nothing.
        uncounted: runs now that say nothing, by verdict.
    """

    findings: list[Finding]
    absent: list[str] = []
    uncounted: dict[str, int] = {}

    def changes(self) -> Counter[Change]:
        """How many findings there are of each kind."""
        return Counter(one.change for one in self.findings)

    @property
    def is_regressed(self) -> bool:
        """Whether anything got worse."""
        return any(one.change is Change.REGRESSED for one in self.findings)

    @property
    def is_open(self) -> bool:
        """Whether anything was not shown, or nothing was looked at."""
        return bool(self.absent) or not self.findings or any(one.change.is_open for one in self.findings)


#: Quotients of two durations of one run: the machine cancels, so they are compared wherever they come from.
QUOTIENTS = ((record.RECOVERY, record.STEP), (record.RECOVERY, record.BOUND))
#: Seconds that decide, where they may be compared. Phases of a recovery explain a change, and decide nothing; the step
#: says how fast the machine was.
SECONDS = (record.RECOVERY,)


def compare(before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float = TOLERANCE) -> Comparison:
    """Compare runs with earlier ones.

    What is counted (runs that did not recover, lost steps, false alarms, losses that differ) is worse when it happens
    and did not before: no chance explains it. Durations are compared by ranks: *regressed* where they are longer by
    more than ``tolerance`` and no accident (1 %), *unchanged* where with 95 % confidence they are not longer by that.

    Args:
        tolerance: a share, such as 0.1.
    """
    earlier, later = _by_series(before), _by_series(after)
    findings = [
        finding
        for key, runs in later.items()
        for finding in (_compare_series(earlier[key], runs, tolerance) if key in earlier else [_no_reference(runs)])
    ]
    absent = [runs[-1].title for key, runs in earlier.items() if key not in later]
    uncounted = Counter(run.verdict.value for run in after if not _counts(run))
    return Comparison(findings=findings, absent=absent, uncounted=dict(uncounted))


def compare_number(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, tolerance: float = TOLERANCE
) -> list[Finding]:
    """Compare one duration of runs with that of earlier ones, series by series; or a quotient, ``recovery / step``."""
    earlier, later = _by_series(before), _by_series(after)
    above, _, below = (part.strip() for part in name.partition("/"))
    of = _quotient(above, below) if below else _value(above)
    unit: record.Unit = "ratio" if below else record.KNOWN[above][0]
    found: list[Finding | None] = []
    for key, runs in later.items():
        if key not in earlier:
            found.append(_no_reference(runs))
        else:
            why_not = _why_incomparable(earlier[key], runs) if unit == "s" else ""
            found.append(_compare_values(earlier[key], runs, name, unit, of, tolerance, why_not))
    return [one for one in found if one is not None]


def _counts(run: RunRecord) -> bool:
    """Whether a run says anything: an unknown one and a broken harness do not."""
    return record.RECOVERED in run.metrics


def _by_series(runs: Iterable[RunRecord]) -> dict[tuple[str, int], list[RunRecord]]:
    found: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        if run.claimed and _counts(run):
            found.setdefault((run.series, run.definition), []).append(run)
    return found


def _no_reference(runs: Sequence[RunRecord]) -> Finding:
    return _finding(runs, "all", "count", Change.NO_REFERENCE, reason=f"runs now: {len(runs)}; before: none")


def _finding(runs: Sequence[RunRecord], metric: str, unit: record.Unit, change: Change, **more: object) -> Finding:
    told = {"series": runs[-1].series, "title": runs[-1].title, "metric": metric, "unit": unit, "change": change}
    return msgspec.convert({**told, **more}, Finding)


def _compare_series(before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float) -> list[Finding]:
    found = [_compare_counts(before, after, name, is_miss) for name, is_miss in _MISSES.items()]
    found += [
        _compare_values(before, after, f"{above} / {below}", "ratio", _quotient(above, below), tolerance)
        for above, below in QUOTIENTS
    ]
    why_not = _why_incomparable(before, after)
    found += [_compare_values(before, after, name, "s", _value(name), tolerance, why_not) for name in SECONDS]
    return [one for one in found if one is not None]


# -- what is counted --------------------------------------------------------------------------------------------------

_MISSES: Mapping[str, Callable[[Metric], bool]] = {
    record.RECOVERED: lambda metric: not metric.value,
    record.LOST_STEPS: lambda metric: metric.value > 0,
    record.FALSE_ALARMS: lambda metric: metric.value > 0,
    record.LOSSES_EQUAL: lambda metric: not metric.value,
}


def _compare_counts(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, is_miss: Callable[[Metric], bool]
) -> Finding | None:
    """Runs that missed, of all. One miss is a finding, unless there were some before."""
    early, late = ([is_miss(run.metrics[name]) for run in runs if name in run.metrics] for runs in (before, after))
    if not late:
        return None
    shares = {"before": sum(early) / len(early) if early else None, "after": sum(late) / len(late)}
    told = f"{sum(late)} of {len(late)} runs missed it, {sum(early)} of {len(early)} before"
    if not early:
        return _finding(after, name, "count", Change.NO_REFERENCE, **shares)
    if not any(late):
        change = Change.BETTER if any(early) and len(late) >= len(early) else Change.UNCHANGED
        return _finding(after, name, "count", change, **shares)
    change = Change.UNDECIDED if any(early) else Change.REGRESSED
    return _finding(after, name, "count", change, reason=told, **shares)


# -- what is measured -------------------------------------------------------------------------------------------------


def _value(name: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.metrics[name].value if name in run.metrics else None


def _quotient(above: str, below: str) -> Callable[[RunRecord], float | None]:
    def of(run: RunRecord) -> float | None:
        over, under = _value(above)(run), _value(below)(run)
        return over / under if over is not None and under else None

    return of


def _samples(runs: Iterable[RunRecord], of: Callable[[RunRecord], float | None]) -> list[float]:
    values = (of(run) for run in runs)
    return [value for value in values if value is not None and 0 < value < inf]


def _compare_values(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    metric: str,
    unit: record.Unit,
    of: Callable[[RunRecord], float | None],
    tolerance: float,
    why_not: str = "",
) -> Finding | None:
    early, late = _samples(before, of), _samples(after, of)
    if not late:
        return None
    told = {"before": middle(early) if early else None, "after": middle(late)}
    if not early:
        return _finding(after, metric, unit, Change.NO_REFERENCE, **told)
    ratio = estimate_ratio(early, late, 0.9)  # each end with 95 %
    if why_not:
        return _finding(after, metric, unit, Change.INCOMPARABLE, ratio=ratio, reason=why_not, **told)
    change = judge(ratio, tolerance)
    reason = ""
    if change is Change.UNDECIDED and min(len(early), len(late)) < (least := least_for(CHANCE)):
        reason = f"runs now: {len(late)}; before: {len(early)}; {least} each at least can decide"
    return _finding(after, metric, unit, change, ratio=ratio, reason=reason, **told)


def judge(ratio: RatioEstimate, tolerance: float = TOLERANCE) -> Change:
    """What a ratio of durations says."""
    if ratio.greater <= CHANCE and ratio.ratio >= 1 + tolerance:
        return Change.REGRESSED
    if ratio.smaller <= CHANCE and ratio.ratio <= 1 / (1 + tolerance):
        return Change.BETTER
    return Change.UNCHANGED if ratio.high < 1 + tolerance else Change.UNDECIDED


def middle(values: Sequence[float]) -> float:
    """The median."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _why_incomparable(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str:
    """Why seconds of these runs say nothing beside each other; "" if they do. Steps without a fault are the control."""
    early, late = ({run.machine for run in runs} for runs in (before, after))
    if early != late:
        return f"another machine: {'; '.join(sorted(late))}, and before {'; '.join(sorted(early))}"
    steps = [_samples(runs, _value(record.STEP)) for runs in (before, after)]
    if not all(steps):
        return "no step before the fault tells how fast the machine was"
    moved = middle(steps[1]) / middle(steps[0])
    return "" if abs(moved - 1) <= CONTROL else f"the machine was not as fast: a step took {moved:.2f} x as long"
