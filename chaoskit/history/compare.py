"""Comparison of two sets of runs: numbers that got worse, that did not, and that are undecided.

This module is pure: it reads no files and no clock.

-> history/series.py: the runs that are compared with each other because they are one series.
-> sla/judge.py: SLAs, which one set of runs meets or breaks. nightly/outcome.py: the exit code of a
night. versions/looks.py: two versions whose tests run in turns.
-> cli/testing/compare.py and pytest_plugin.py show the findings and exit by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from math import inf
from statistics import median

import msgspec

from chaoskit.history import record
from chaoskit.history.finding import NumberChange, NumberFinding, Unit
from chaoskit.history.ratio_estimate import RatioEstimate, estimate_ratio
from chaoskit.history.record import AcceptedRecord, Metric, RunRecord
from chaoskit.history.shares import more_by_chance
from chaoskit.vocabulary import Verdict

#: The growth of a duration that counts as worse, as a fraction. Sessions of the same code differ by
#: 10 to 15 %.
TOLERANCE = 0.25
#: The significance level: the largest probability that chance alone explains a reported change.
CHANCE = 0.005
#: The number of runs on each side below which durations are undecided. All runs of a session share
#: its conditions.
RUNS_LEAST = 5
#: The share of a session's regressions that may be false (Benjamini and Hochberg, 1995).
FALSE_SHARE = 0.05
#: Seconds of two sessions are compared if their steps took equally long, within this share.
CONTROL = 0.05


class RunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a comparison, series by series.

    Attributes:
        findings: a finding for each number of each series.
        absent: titles of earlier series that have no conclusive run now.
        uncounted: the number of inconclusive runs now, by verdict; or "unclaimed" if the test
            judges them itself.
    """

    findings: list[NumberFinding]
    absent: list[str] = []
    uncounted: dict[str, int] = {}

    def changes(self) -> Counter[NumberChange]:
        """Return the number of findings of each kind."""
        return Counter(finding.change for finding in self.findings)

    @property
    def is_regressed(self) -> bool:
        """True if a number got worse and the change was not accepted."""
        return any(finding.is_failure for finding in self.findings)

    @property
    def is_nothing(self) -> bool:
        """True if no number could be compared at all, as without findings."""
        nothing = (NumberChange.INCOMPARABLE, NumberChange.NO_REFERENCE)
        return all(
            finding.change in nothing
            or (finding.change is NumberChange.UNDECIDED and finding.metric == "all")
            for finding in self.findings
        )

    @property
    def is_open(self) -> bool:
        """True if a series is absent, there are no findings, or a change remains unclear.

        Such a change is *undecided*, *incomparable* or *no reference*.
        """
        return (
            bool(self.absent)
            or not self.findings
            or any(finding.change.is_open for finding in self.findings)
        )


def with_accepted(
    comparison: RunComparison, accepted: Iterable[AcceptedRecord], today: date
) -> RunComparison:
    """Return a comparison in which accepted regressions are marked, each with day and reason.

    Acceptances that expired before ``today`` do not count.
    """
    return msgspec.structs.replace(
        comparison, findings=with_accepted_findings(comparison.findings, accepted, today)
    )


def with_accepted_findings(
    findings: Iterable[NumberFinding], accepted: Iterable[AcceptedRecord], today: date
) -> list[NumberFinding]:
    """Return findings in which accepted regressions are marked, each with day and reason.

    Acceptances that expired before ``today`` do not count.
    """
    valid = [acceptance for acceptance in accepted if today <= acceptance.until]
    return [_with_accepted(finding, valid) for finding in findings]


def _with_accepted(finding: NumberFinding, accepted: Sequence[AcceptedRecord]) -> NumberFinding:
    """Return a finding; a regression is marked with the acceptance that lasts longest, if any."""
    matching = [
        acceptance
        for acceptance in accepted
        if acceptance.series == finding.series and acceptance.metric in ("", finding.metric)
    ]
    if finding.change is not NumberChange.REGRESSED or not matching:
        return finding
    latest = max(matching, key=lambda acceptance: acceptance.until)
    return msgspec.structs.replace(
        finding, accepted=f"accepted until {latest.until}: {latest.reason}"
    )


def exit_code(comparison: RunComparison, *, is_strict: bool) -> int:
    """Return the exit code of a comparison.

    1: a number got worse, and this was not accepted. 10: no number could be compared or, with
    ``is_strict``, the comparison is open. 0: all other cases.
    """
    if comparison.is_regressed:
        return Verdict.FAILED.exit_code
    return (
        Verdict.UNKNOWN.exit_code
        if comparison.is_nothing or (is_strict and comparison.is_open)
        else 0
    )


#: Ratios of two durations of one run: the speed of the machine cancels as far as both depend on it.
QUOTIENTS = ((record.RECOVERY, record.STEP), (record.RECOVERY, record.BOUND))
#: Durations that decide, where they may be compared. Phases of a recovery only explain a change.
#: The step shows how fast the machine was.
SECONDS = (record.RECOVERY,)

NumberReader = Callable[[RunRecord], float | None]


def compare(
    before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float = TOLERANCE
) -> RunComparison:
    """Compare runs with earlier ones, and return a finding for each number of each series.

    Inconclusive runs are left out. A series without earlier runs has one finding, *no reference*.
    Earlier series without later runs are in ``absent`` of the result.

    Counted numbers are runs that did not recover, false alarms, losses that differ, and runs that
    failed for another reason. Each is worse if it happens and did not before. If it happened
    before, and for lost steps, the shares of runs are compared.

    Durations are compared by ranks. They are *regressed* if they are longer by ``tolerance`` or
    more and chance hardly explains it, and *better* if they are shorter likewise. They are
    *unchanged* if they are not longer by that with 95 % confidence, else *undecided*. They are also
    *undecided* with fewer than :data:`RUNS_LEAST` runs on a side. Seconds of other machines or
    speeds are *incomparable*.

    Args:
        tolerance: the growth that counts as worse, as a fraction such as 0.1.
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
            else [_no_reference_finding(runs)]
        )
    ]
    absent = [runs[-1].title for key, runs in earlier.items() if key not in later]
    uncounted = Counter(
        run.verdict.value if run.claimed else "unclaimed" for run in after if not is_conclusive(run)
    )
    return RunComparison(
        findings=withdraw_chance_regressions(findings), absent=absent, uncounted=dict(uncounted)
    )


def compare_number(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, tolerance: float = TOLERANCE
) -> list[NumberFinding]:
    """Return a finding for each series about a duration of its runs and of earlier ones.

    A series has no finding if neither its runs nor earlier ones have the duration. A series without
    earlier runs has the finding *no reference*.

    Args:
        name: a duration of :data:`chaoskit.history.record.KNOWN`, or a ratio such as
            ``recovery / step``.
        tolerance: the growth that counts as worse, as a fraction.
    """
    earlier, later = (
        by_series(filter(is_conclusive, before)),
        by_series(filter(is_conclusive, after)),
    )
    numerator, _, denominator = (part.strip() for part in name.partition("/"))
    findings: list[NumberFinding | None] = []
    for key, runs in later.items():
        if key not in earlier:
            findings.append(_no_reference_finding(runs))
        else:
            compared = _compare_quotient if denominator else _compare_seconds
            findings.append(
                compared(
                    earlier[key],
                    runs,
                    numerator,
                    *([denominator] if denominator else []),
                    tolerance=tolerance,
                )
            )
    return [finding for finding in findings if finding is not None]


def is_conclusive(run: RunRecord) -> bool:
    """Return True if a run counts.

    Unknown runs, broken harnesses, and runs that their test judges itself do not.
    """
    return run.claimed and (record.RECOVERED in run.metrics or record.PASSED in run.metrics)


def by_series(runs: Iterable[RunRecord]) -> dict[tuple[str, int], list[RunRecord]]:
    """Return the runs of each series and definition, in their order."""
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault((run.series, run.definition), []).append(run)
    return groups


def _no_reference_finding(runs: Sequence[RunRecord]) -> NumberFinding:
    """Return the finding that a series has no earlier runs."""
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
    """Return a finding about runs of one series, with the title of the last run.

    Args:
        more: other fields of the finding.
    """
    fields = {
        "series": runs[-1].series,
        "title": runs[-1].title,
        "metric": metric,
        "unit": unit,
        "change": change,
    }
    return msgspec.convert({**fields, **more}, NumberFinding)


def _compare_series(
    before: Sequence[RunRecord], after: Sequence[RunRecord], tolerance: float
) -> list[NumberFinding]:
    """Return the findings about all numbers of a series."""
    findings: list[NumberFinding | None] = [*compare_counts(before, after)]
    quotients = [
        pair
        for pair in QUOTIENTS
        if pair[1] != record.BOUND or not _has_step_bounds([*before, *after])
    ]
    if is_behind([*before, *after]):
        quotients.append((record.FULL_STRENGTH, record.STEP))
    findings += [
        _compare_quotient(before, after, numerator, denominator, tolerance=tolerance)
        for numerator, denominator in quotients
    ]
    findings += [_compare_seconds(before, after, name, tolerance=tolerance) for name in SECONDS]
    return [finding for finding in findings if finding is not None]


def is_behind(runs: Sequence[RunRecord]) -> bool:
    """Return True if in some run the world became whole later than the training went on, or never.

    Otherwise ``full_strength`` equals the recovery, which is compared already. The result is also
    False if no run with a recovery has ``full_strength``.
    """
    complete = [
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
        for run in complete
    )
    return bool(complete) and (bool(lacking) or any(later))


def _has_step_bounds(runs: Sequence[RunRecord]) -> bool:
    """Return True if the bound of each recovery is one step, or no run has a bound.

    Both ratios are the same then. This is the case for commands.
    """
    bounds = [(_number_reader(record.BOUND)(run), _number_reader(record.STEP)(run)) for run in runs]
    return all(bound == step for bound, step in bounds if bound is not None)


def withdraw_chance_regressions(findings: Sequence[NumberFinding]) -> list[NumberFinding]:
    """Return findings in which regressions that chance may explain have become *undecided*.

    The more numbers are compared, the more of them look regressed by chance. Findings without a
    ratio, such as those about counted numbers, stay.
    """
    probabilities = sorted(
        finding.ratio.greater
        for finding in findings
        if finding.ratio is not None and _is_tested(finding)
    )
    significant = [
        probability
        for rank, probability in enumerate(probabilities, 1)
        if probability <= FALSE_SHARE * rank / len(probabilities)
    ]
    largest_significant = max(significant, default=0.0)
    reason = f"of {len(probabilities)} numbers some look regressed by chance; more runs can decide"
    return [
        msgspec.structs.replace(finding, change=NumberChange.UNDECIDED, reason=reason)
        if finding.change is NumberChange.REGRESSED
        and finding.ratio is not None
        and finding.ratio.greater > largest_significant
        else finding
        for finding in findings
    ]


def _is_tested(finding: NumberFinding) -> bool:
    """Return True if a finding results from a test of two samples."""
    return finding.change not in (NumberChange.INCOMPARABLE, NumberChange.NO_REFERENCE)


# -- what is counted -------------------------------------------------------------------------------

_MISSES: Mapping[str, Callable[[Metric], bool]] = {
    record.RECOVERED: lambda metric: not metric.value,
    record.LOST_STEPS: lambda metric: metric.value > 0,
    record.FALSE_ALARMS: lambda metric: metric.value > 0,
    record.LOSSES_EQUAL: lambda metric: not metric.value,
}
#: Causes of a failed run that are counted by themselves.
_REASONS = (record.RECOVERED, record.FALSE_ALARMS, record.LOSSES_EQUAL)
#: The loss of a step may depend on the moment of the fault, and a run may be allowed to lose some.
_BY_SHARES_ALONE = record.LOST_STEPS


def compare_counts(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> list[NumberFinding]:
    """Return a finding for each counted number, about the shares of runs that missed it.

    Numbers that no run has are left out, and so is *passed* if no run missed it.
    """
    findings = (_compare_count(before, after, name) for name in (*_MISSES, record.PASSED))
    return [finding for finding in findings if finding is not None]


def _is_missed(run: RunRecord, name: str) -> bool | None:
    """Return True if a run missed the counted number; None if the run does not contain it.

    A run misses *passed* only if it failed for a reason that no other number counts.
    """
    if name == record.PASSED:
        return not record.passed(run) and not any(_is_missed(run, reason) for reason in _REASONS)
    return _MISSES[name](run.metrics[name]) if name in run.metrics else None


def _compare_count(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str
) -> NumberFinding | None:
    """Return a finding about the shares of runs that missed a counted number.

    It is None if no run has the number, or if no run missed *passed*.
    """
    missed_before, missed_after = (
        [missed for run in runs if (missed := _is_missed(run, name)) is not None]
        for runs in (before, after)
    )
    if name == record.PASSED and not any(missed_before) and not any(missed_after):
        return None
    if not missed_after:
        return (
            _missing_number_finding(after, name, "count", len(missed_before))
            if missed_before
            else None
        )
    if not missed_before:
        return finding_of(
            after,
            name,
            "count",
            NumberChange.NO_REFERENCE,
            after=sum(missed_after) / len(missed_after),
        )
    shares = {
        "before": sum(missed_before) / len(missed_before),
        "after": sum(missed_after) / len(missed_after),
    }
    reason = (
        f"{sum(missed_after)} of {len(missed_after)} runs missed it, "
        f"{sum(missed_before)} of {len(missed_before)} before"
    )
    is_new = any(missed_after) and not any(missed_before) and name != _BY_SHARES_ALONE
    if (
        is_new
        or more_by_chance(
            sum(missed_before), len(missed_before), sum(missed_after), len(missed_after)
        )
        <= CHANCE
    ):
        return finding_of(after, name, "count", NumberChange.REGRESSED, reason=reason, **shares)
    if (
        more_by_chance(sum(missed_after), len(missed_after), sum(missed_before), len(missed_before))
        <= CHANCE
    ):
        return finding_of(after, name, "count", NumberChange.BETTER, **shares)
    if any(missed_before) or any(missed_after):
        return finding_of(after, name, "count", NumberChange.UNDECIDED, reason=reason, **shares)
    return finding_of(after, name, "count", NumberChange.UNCHANGED, **shares)


def _missing_number_finding(
    after: Sequence[RunRecord], metric: str, unit: Unit, runs_before: int
) -> NumberFinding:
    """Return the finding *undecided* about a number that is missing now and that earlier runs have.

    Args:
        runs_before: the number of earlier runs that have it.
    """
    reason = f"not measured any more: {runs_before} runs before have it"
    return finding_of(after, metric, unit, NumberChange.UNDECIDED, reason=reason)


# -- what is measured ------------------------------------------------------------------------------


def _number_reader(name: str) -> NumberReader:
    """Return a function that reads a number of a run; None for a run without it."""
    return lambda run: run.metrics[name].value if name in run.metrics else None


def _quotient_reader(numerator: str, denominator: str) -> NumberReader:
    """Return a function that computes the ratio of two numbers of a run; None without both."""

    def read_number(run: RunRecord) -> float | None:
        dividend, divisor = _number_reader(numerator)(run), _number_reader(denominator)(run)
        return dividend / divisor if dividend is not None and divisor else None

    return read_number


def samples_of(runs: Iterable[RunRecord], number: str) -> list[float]:
    """Return the values of a number over the runs that came back.

    Values that are not above 0, or infinite, are left out.

    Args:
        number: its name, or a ratio such as ``recovery / step``.
    """
    numerator, _, denominator = (part.strip() for part in number.partition("/"))
    return _samples(
        runs, _quotient_reader(numerator, denominator) if denominator else _number_reader(numerator)
    )


def _samples(runs: Iterable[RunRecord], read_number: NumberReader) -> list[float]:
    """Return the values of runs that came back.

    The duration of a failed recovery cannot be compared.
    """
    numbers = (read_number(run) for run in runs if record.came_back(run))
    return [number for number in numbers if number is not None and 0 < number < inf]


def _compare_quotient(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    numerator: str,
    denominator: str,
    *,
    tolerance: float,
) -> NumberFinding | None:
    """Return a finding about a ratio of two durations; None if no run has it.

    The ratio also grows if the divisor alone got smaller. Such a change is incomparable, not
    regressed.
    """
    finding = _compare_values(
        before,
        after,
        f"{numerator} / {denominator}",
        "ratio",
        _quotient_reader(numerator, denominator),
        tolerance,
    )
    if finding is None or finding.change is not NumberChange.REGRESSED:
        return finding
    values_before, values_after = (
        _samples(runs, _number_reader(numerator)) for runs in (before, after)
    )
    seconds_ratio = estimate_ratio(values_before, values_after).ratio
    if seconds_ratio >= 1 + tolerance:
        return finding
    reason = (
        f"{denominator} got shorter, and {numerator} took {seconds_ratio:.2f} x as long in seconds"
    )
    return msgspec.structs.replace(finding, change=NumberChange.INCOMPARABLE, reason=reason)


def _compare_seconds(
    before: Sequence[RunRecord], after: Sequence[RunRecord], name: str, *, tolerance: float
) -> NumberFinding | None:
    """Return a finding about a duration; None if no run has it.

    Only runs on one machine are compared. It has runs of both sides, and the most later runs.
    Without such a machine, or if its speed has changed, the finding is *incomparable*.
    """
    shared = {run.machine for run in before} & {run.machine for run in after}
    unit = record.KNOWN[name][0]
    if not shared:
        machines_before, machines_now = (
            "; ".join(sorted({run.machine for run in runs})) for runs in (before, after)
        )
        return _compare_values(
            before,
            after,
            name,
            unit,
            _number_reader(name),
            tolerance,
            f"another machine: {machines_now}; before: {machines_before}",
        )
    machine = max(sorted(shared), key=[run.machine for run in after].count)
    before, after = ([run for run in runs if run.machine == machine] for runs in (before, after))
    return _compare_values(
        before, after, name, unit, _number_reader(name), tolerance, _speed_difference(before, after)
    )


def _compare_values(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    metric: str,
    unit: Unit,
    read_number: NumberReader,
    tolerance: float,
    why_not: str = "",
) -> NumberFinding | None:
    """Return a finding about a number, compared by ranks; None if no run has it.

    It is *undecided* if only earlier runs have the number, or fewer than five runs of one side. It
    is *no reference* if only later runs have it.

    Args:
        read_number: reads the number of a run.
        why_not: why the number cannot be compared; "" if it can.
    """
    values_before, values_after = _samples(before, read_number), _samples(after, read_number)
    if not values_after:
        return (
            _missing_number_finding(after, metric, unit, len(values_before))
            if values_before
            else None
        )
    if not values_before:
        return finding_of(
            after, metric, unit, NumberChange.NO_REFERENCE, after=median(values_after)
        )
    # an interval of 90 % has 95 % at each end
    fields = {
        "before": median(values_before),
        "after": median(values_after),
        "ratio": estimate_ratio(values_before, values_after, 0.9),
    }
    if why_not:
        return finding_of(after, metric, unit, NumberChange.INCOMPARABLE, reason=why_not, **fields)
    if min(len(values_before), len(values_after)) < RUNS_LEAST:
        reason = (
            f"runs now: {len(values_after)}; before: {len(values_before)}; "
            f"needed: at least {RUNS_LEAST} of each"
        )
        return finding_of(after, metric, unit, NumberChange.UNDECIDED, reason=reason, **fields)
    return finding_of(
        after,
        metric,
        unit,
        judge(estimate_ratio(values_before, values_after, 0.9), tolerance),
        **fields,
    )


def judge(
    ratio: RatioEstimate, tolerance: float = TOLERANCE, chance: float = CHANCE
) -> NumberChange:
    """Return the change that a ratio of durations with an interval of 90 % shows.

    It is *regressed* or *better* if the ratio is beyond the tolerance and chance hardly explains
    it. It is *unchanged* if the whole interval is below the tolerance, else *undecided*.

    Args:
        tolerance: the growth that counts as worse, as a fraction.
        chance: the significance level, from 0 to 1.
    """
    if ratio.greater <= chance and ratio.ratio >= 1 + tolerance:
        return NumberChange.REGRESSED
    if ratio.smaller <= chance and ratio.ratio <= 1 / (1 + tolerance):
        return NumberChange.BETTER
    return NumberChange.UNCHANGED if ratio.high < 1 + tolerance else NumberChange.UNDECIDED


def _speed_difference(before: Sequence[RunRecord], after: Sequence[RunRecord]) -> str:
    """Return why seconds of one machine are incomparable now; "" if they are comparable.

    Steps without a fault are the control.
    """
    steps = [_samples(runs, _number_reader(record.STEP)) for runs in (before, after)]
    if not all(steps):
        return "the speed of the machine is unknown: no step before the fault was measured"
    step_ratio = median(steps[1]) / median(steps[0])
    speed = "slower" if step_ratio > 1 else "faster"
    return (
        ""
        if abs(step_ratio - 1) <= CONTROL
        else f"the machine was {speed}: a step took {step_ratio:.2f} x as long"
    )
