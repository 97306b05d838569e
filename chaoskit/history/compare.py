"""Two sets of runs beside each other: what got worse, what did not, and of what nothing can be said. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from math import inf
from statistics import median

import msgspec

from chaoskit.history import record
from chaoskit.history.finding import NumberChange, NumberFinding, Unit
from chaoskit.history.ranks import RatioEstimate, estimate_ratio
from chaoskit.history.record import AcceptedRecord, Metric, RunRecord
from chaoskit.history.shares import more_by_chance
from chaoskit.vocabulary import Verdict

#: How much longer something may take before it counts as worse. Sessions of the same code differ by some 10 to 15 %.
TOLERANCE = 0.25
#: What looks worse by chance alone in one of two hundred cases, or more often, is not called so.
CHANCE = 0.005
#: Runs on each side, below which nothing is said of durations: runs of one session have that session in common.
RUNS_LEAST = 5
#: Of all numbers of a session that are called worse, this share may be so by chance (Benjamini and Hochberg, 1995).
FALSE_SHARE = 0.05
#: Seconds of two sessions are compared if steps took as long in both, but for this share.
CONTROL = 0.05


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, series by series.

    Attributes:
        absent: titles of series of before that have no run now that says anything.
        uncounted: runs now that say nothing: by their verdict, or because their test judges them itself.
    """

    findings: list[NumberFinding]
    absent: list[str] = []
    uncounted: dict[str, int] = {}

    def changes(self) -> Counter[NumberChange]:
        """How many findings there are of each kind."""
        return Counter(one.change for one in self.findings)

    @property
    def is_regressed(self) -> bool:
        """Whether anything got worse that was not accepted."""
        return any(one.is_failure for one in self.findings)

    @property
    def is_nothing(self) -> bool:
        """Whether nothing could be compared at all."""
        nothing = (NumberChange.INCOMPARABLE, NumberChange.NO_REFERENCE)
        return all(
            one.change in nothing or (one.change is NumberChange.UNDECIDED and one.metric == "all")
            for one in self.findings
        )

    @property
    def is_open(self) -> bool:
        """Whether anything was not shown, or nothing was looked at."""
        return (
            bool(self.absent)
            or not self.findings
            or any(one.change.is_open for one in self.findings)
        )


def with_accepted(
    comparison: RunComparison, accepted: Iterable[AcceptedRecord], today: date
) -> RunComparison:
    """Note which of what is worse was accepted, and until when."""
    return msgspec.structs.replace(
        comparison, findings=with_accepted_findings(comparison.findings, accepted, today)
    )


def with_accepted_findings(
    findings: Iterable[NumberFinding], accepted: Iterable[AcceptedRecord], today: date
) -> list[NumberFinding]:
    """The same of findings alone."""
    known = [one for one in accepted if today <= one.until]
    return [_with_accepted(one, known) for one in findings]


def _with_accepted(finding: NumberFinding, accepted: Sequence[AcceptedRecord]) -> NumberFinding:
    mine = [
        one
        for one in accepted
        if one.series == finding.series and one.metric in ("", finding.metric)
    ]
    if finding.change is not NumberChange.REGRESSED or not mine:
        return finding
    latest = max(mine, key=lambda one: one.until)
    return msgspec.structs.replace(
        finding, accepted=f"accepted until {latest.until}: {latest.reason}"
    )


def exit_code(comparison: RunComparison, *, is_strict: bool) -> int:
    """0: nothing got worse. 1: something did. 10: nothing could be compared; with ``is_strict``, not all of it."""
    if comparison.is_regressed:
        return Verdict.FAILED.exit_code
    return (
        Verdict.UNKNOWN.exit_code
        if comparison.is_nothing or (is_strict and comparison.is_open)
        else 0
    )


#: Quotients of two durations of one run, so that the speed of the machine cancels, as far as both depend on it.
QUOTIENTS = ((record.RECOVERY, record.STEP), (record.RECOVERY, record.BOUND))
#: Seconds that decide, where they may be compared. Phases of a recovery explain a change, and decide nothing; the step
#: says how fast the machine was.
SECONDS = (record.RECOVERY,)

Of = Callable[[RunRecord], float | None]


def compare(
    before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float = TOLERANCE
) -> RunComparison:
    """Compare runs with earlier ones.

    What is counted (runs that did not recover, false alarms, losses that differ, runs that failed for another reason)
    is worse when it happens and did not before; where it did, and for lost steps, by the share of runs. Durations are
    compared by ranks: *regressed* where they are longer by more than ``tolerance`` and hardly by chance, *unchanged*
    where with 95 % confidence they are not longer by that.

    Args:
        tolerance: a share, such as 0.1.
    """
    earlier, later = (
        by_series(filter(is_conclusive, before)),
        by_series(filter(is_conclusive, after)),
    )
    findings = [
        finding
        for key, runs in later.items()
        for finding in (
            _compare_series(earlier[key], runs, tolerance)
            if key in earlier
            else [_no_reference(runs)]
        )
    ]
    absent = [runs[-1].title for key, runs in earlier.items() if key not in later]
    uncounted = Counter(
        run.verdict.value if run.claimed else "unclaimed" for run in after if not is_conclusive(run)
    )
    return RunComparison(findings=beyond_chance(findings), absent=absent, uncounted=dict(uncounted))


def compare_number(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, tolerance: float = TOLERANCE
) -> list[NumberFinding]:
    """Compare one duration of runs with that of earlier ones, series by series; or a quotient, ``recovery / step``."""
    earlier, later = (
        by_series(filter(is_conclusive, before)),
        by_series(filter(is_conclusive, after)),
    )
    above, _, below = (part.strip() for part in name.partition("/"))
    found: list[NumberFinding | None] = []
    for key, runs in later.items():
        if key not in earlier:
            found.append(_no_reference(runs))
        else:
            compared = _compare_quotient if below else _compare_seconds
            found.append(
                compared(
                    earlier[key], runs, above, *([below] if below else []), tolerance=tolerance
                )
            )
    return [one for one in found if one is not None]


def is_conclusive(run: RunRecord) -> bool:
    """Whether a run says anything: an unknown one, a broken harness and one that its test judges itself do not."""
    return run.claimed and (record.RECOVERED in run.metrics or record.PASSED in run.metrics)


def by_series(runs: Iterable[RunRecord]) -> dict[tuple[str, int], list[RunRecord]]:
    """Runs of each series and definition, in their order."""
    found: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        found.setdefault((run.series, run.definition), []).append(run)
    return found


def _no_reference(runs: Sequence[RunRecord]) -> NumberFinding:
    return finding_of(
        runs,
        "all",
        "count",
        NumberChange.NO_REFERENCE,
        reason=f"runs now: {len(runs)}; before: none",
    )


def finding_of(
    runs: Sequence[RunRecord], metric: str, unit: Unit, change: NumberChange, **more: object
) -> NumberFinding:
    """A finding about runs of one series."""
    told = {
        "series": runs[-1].series,
        "title": runs[-1].title,
        "metric": metric,
        "unit": unit,
        "change": change,
    }
    return msgspec.convert({**told, **more}, NumberFinding)


def _compare_series(
    before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float
) -> list[NumberFinding]:
    found: list[NumberFinding | None] = [*compare_counts(before, after)]
    quotients = [
        pair
        for pair in QUOTIENTS
        if pair[1] != record.BOUND or not _is_bound_a_step([*before, *after])
    ]
    if is_behind([*before, *after]):
        quotients.append((record.FULL_STRENGTH, record.STEP))
    found += [
        _compare_quotient(before, after, above, below, tolerance=tolerance)
        for above, below in quotients
    ]
    found += [_compare_seconds(before, after, name, tolerance=tolerance) for name in SECONDS]
    return [one for one in found if one is not None]


def is_behind(runs: Sequence[RunRecord]) -> bool:
    """Return whether the world of some run was whole again later than its training went on, or never.

    Else ``full_strength`` is the recovery itself, which is compared already.
    """
    known = [
        run
        for run in runs
        if record.FULL_STRENGTH in run.metrics and record.RECOVERY in run.metrics
    ]
    lacking = [
        run
        for run in runs
        if record.RECOVERY in run.metrics and record.FULL_STRENGTH not in run.metrics
    ]
    later = (
        run.metrics[record.FULL_STRENGTH].value > run.metrics[record.RECOVERY].value
        for run in known
    )
    return bool(known) and (bool(lacking) or any(later))


def _is_bound_a_step(runs: Sequence[RunRecord]) -> bool:
    """Return whether the bound of each recovery is one step, as of a command: then both quotients are the same."""
    bounds = [(_value(record.BOUND)(run), _value(record.STEP)(run)) for run in runs]
    return all(bound == step for bound, step in bounds if bound is not None)


def beyond_chance(findings: Sequence[NumberFinding]) -> list[NumberFinding]:
    """Take back what is called worse where among so many numbers some look so by chance."""
    tested = sorted(
        one.ratio.greater for one in findings if one.ratio is not None and _is_tested(one)
    )
    passed = [
        value for rank, value in enumerate(tested, 1) if value <= FALSE_SHARE * rank / len(tested)
    ]
    most = max(passed, default=0.0)
    reason = f"of {len(tested)} numbers some look so by chance: more runs can decide"
    return [
        msgspec.structs.replace(one, change=NumberChange.UNDECIDED, reason=reason)
        if one.change is NumberChange.REGRESSED
        and one.ratio is not None
        and one.ratio.greater > most
        else one
        for one in findings
    ]


def _is_tested(finding: NumberFinding) -> bool:
    return finding.change not in (NumberChange.INCOMPARABLE, NumberChange.NO_REFERENCE)


# -- what is counted --------------------------------------------------------------------------------------------------

_MISSES: Mapping[str, Callable[[Metric], bool]] = {
    record.RECOVERED: lambda metric: not metric.value,
    record.LOST_STEPS: lambda metric: metric.value > 0,
    record.FALSE_ALARMS: lambda metric: metric.value > 0,
    record.LOSSES_EQUAL: lambda metric: not metric.value,
}
#: Reasons for which a run fails that are counted by themselves.
_REASONS = (record.RECOVERED, record.FALSE_ALARMS, record.LOSSES_EQUAL)
#: Whether a step is lost may depend on the moment of a fault, and a run may be allowed to lose some.
_BY_SHARES_ALONE = record.LOST_STEPS


def compare_counts(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> list[NumberFinding]:
    """Compare what is counted: runs that missed it, of all."""
    found = (_compare_count(before, after, name) for name in (*_MISSES, record.PASSED))
    return [one for one in found if one is not None]


def _is_missed(run: RunRecord, name: str) -> bool | None:
    """Return whether a run missed what is counted by this name; None if it says nothing of it."""
    if name == record.PASSED:
        return not record.passed(run) and not any(_is_missed(run, reason) for reason in _REASONS)
    return _MISSES[name](run.metrics[name]) if name in run.metrics else None


def _compare_count(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str
) -> NumberFinding | None:
    early, late = (
        [missed for run in runs if (missed := _is_missed(run, name)) is not None]
        for runs in (before, after)
    )
    if name == record.PASSED and not any(early) and not any(late):
        return None
    if not late:
        return _not_measured(after, name, "count", len(early)) if early else None
    if not early:
        return finding_of(
            after, name, "count", NumberChange.NO_REFERENCE, after=sum(late) / len(late)
        )
    shares = {"before": sum(early) / len(early), "after": sum(late) / len(late)}
    told = f"{sum(late)} of {len(late)} runs missed it, {sum(early)} of {len(early)} before"
    is_new = any(late) and not any(early) and name != _BY_SHARES_ALONE
    if is_new or more_by_chance(sum(early), len(early), sum(late), len(late)) <= CHANCE:
        return finding_of(after, name, "count", NumberChange.REGRESSED, reason=told, **shares)
    if more_by_chance(sum(late), len(late), sum(early), len(early)) <= CHANCE:
        return finding_of(after, name, "count", NumberChange.BETTER, **shares)
    if any(early) or any(late):
        return finding_of(after, name, "count", NumberChange.UNDECIDED, reason=told, **shares)
    return finding_of(after, name, "count", NumberChange.UNCHANGED, **shares)


def _not_measured(
    after: Sequence[RunRecord], metric: str, unit: Unit, before: int
) -> NumberFinding:
    reason = f"not measured any more: {before} runs before have it"
    return finding_of(after, metric, unit, NumberChange.UNDECIDED, reason=reason)


# -- what is measured -------------------------------------------------------------------------------------------------


def _value(name: str) -> Of:
    return lambda run: run.metrics[name].value if name in run.metrics else None


def _quotient(above: str, below: str) -> Of:
    def of(run: RunRecord) -> float | None:
        over, under = _value(above)(run), _value(below)(run)
        return over / under if over is not None and under else None

    return of


def samples_of(runs: Iterable[RunRecord], number: str) -> list[float]:
    """The values of a number, or of a quotient such as ``recovery / step``, of the runs that came back."""
    above, _, below = (part.strip() for part in number.partition("/"))
    return _samples(runs, _quotient(above, below) if below else _value(above))


def _samples(runs: Iterable[RunRecord], of: Of) -> list[float]:
    """Values of runs that came back: how long one took that did not says nothing of the others."""
    values = (of(run) for run in runs if record.came_back(run))
    return [value for value in values if value is not None and 0 < value < inf]


def _compare_quotient(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    above: str,
    below: str,
    *,
    tolerance: float,
) -> NumberFinding | None:
    """It grows, too, where the divisor alone got smaller: then nothing got worse."""
    found = _compare_values(
        before, after, f"{above} / {below}", "ratio", _quotient(above, below), tolerance
    )
    if found is None or found.change is not NumberChange.REGRESSED:
        return found
    early, late = (_samples(runs, _value(above)) for runs in (before, after))
    grown = estimate_ratio(early, late).ratio
    if grown >= 1 + tolerance:
        return found
    reason = f"{below} got shorter, and {above} took {grown:.2f} x as long in seconds"
    return msgspec.structs.replace(found, change=NumberChange.INCOMPARABLE, reason=reason)


def _compare_seconds(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, *, tolerance: float
) -> NumberFinding | None:
    """Those of one machine, that on which most of the runs were made that are compared."""
    shared = {run.machine for run in before} & {run.machine for run in after}
    unit = record.KNOWN[name][0]
    if not shared:
        then, now = ("; ".join(sorted({run.machine for run in runs})) for runs in (before, after))
        return _compare_values(
            before,
            after,
            name,
            unit,
            _value(name),
            tolerance,
            f"another machine: {now}; before: {then}",
        )
    machine = max(sorted(shared), key=[run.machine for run in after].count)
    before, after = ([run for run in runs if run.machine == machine] for runs in (before, after))
    return _compare_values(
        before, after, name, unit, _value(name), tolerance, _why_not_as_fast(before, after)
    )


def _compare_values(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    metric: str,
    unit: Unit,
    of: Of,
    tolerance: float,
    why_not: str = "",
) -> NumberFinding | None:
    early, late = _samples(before, of), _samples(after, of)
    if not late:
        return _not_measured(after, metric, unit, len(early)) if early else None
    if not early:
        return finding_of(after, metric, unit, NumberChange.NO_REFERENCE, after=median(late))
    told = {
        "before": median(early),
        "after": median(late),
        "ratio": estimate_ratio(early, late, 0.9),
    }  # 95 % each end
    if why_not:
        return finding_of(after, metric, unit, NumberChange.INCOMPARABLE, reason=why_not, **told)
    if min(len(early), len(late)) < RUNS_LEAST:
        reason = (
            f"runs now: {len(late)}; before: {len(early)}; {RUNS_LEAST} each at least can decide"
        )
        return finding_of(after, metric, unit, NumberChange.UNDECIDED, reason=reason, **told)
    return finding_of(
        after, metric, unit, judge(estimate_ratio(early, late, 0.9), tolerance), **told
    )


def judge(
    ratio: RatioEstimate, tolerance: float = TOLERANCE, chance: float = CHANCE
) -> NumberChange:
    """What a ratio of durations says, with an interval of 90 %."""
    if ratio.greater <= chance and ratio.ratio >= 1 + tolerance:
        return NumberChange.REGRESSED
    if ratio.smaller <= chance and ratio.ratio <= 1 / (1 + tolerance):
        return NumberChange.BETTER
    return NumberChange.UNCHANGED if ratio.high < 1 + tolerance else NumberChange.UNDECIDED


def _why_not_as_fast(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str:
    """Why seconds of one machine say nothing now; "" if they do. Steps without a fault are the control."""
    steps = [_samples(runs, _value(record.STEP)) for runs in (before, after)]
    if not all(steps):
        return "no step before the fault tells how fast the machine was"
    moved = median(steps[1]) / median(steps[0])
    speed = "slower" if moved > 1 else "faster"
    return (
        ""
        if abs(moved - 1) <= CONTROL
        else f"the machine was {speed}: a step took {moved:.2f} x as long"
    )
