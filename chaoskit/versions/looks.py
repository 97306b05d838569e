"""Decisions about a test whose runs take turns: when they are made, and how. Pure.

A comparison of two sessions cannot distinguish a slower program from a slower day. Here both
versions run in turns, so the day is the same for both, and seconds can be compared. Results are
examined three times, because few runs answer most questions. ``benchmarks/results.md`` has the
error rates on recorded recoveries.

-> history/compare.py: ``judge``, the rule for one ratio. versions/phases.py: the phase that grew.
-> versions/schedule.py runs undecided tests further, and ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from chaoskit.errors import BadInput
from chaoskit.history import record
from chaoskit.history.compare import finding_of, is_behind, judge, samples_of
from chaoskit.history.finding import WHOLE, NumberChange, NumberFinding, Unit
from chaoskit.history.ratio_estimate import estimate_ratio
from chaoskit.history.record import RunRecord
from chaoskit.versions.phases import grown_phase

#: The growth of a duration that counts as worse, as a fraction. A change of just this size is
#: mostly *undecided*.
TOLERANCE = 0.10
#: The relative spread of a number between runs of one version beyond which its ratio would be luck.
SPREAD_MOST = 0.25
#: The numbers that are compared of each test that has them.
NUMBERS = (record.RECOVERY, record.STEP, record.phase_name("restored"))
#: The share of runs that must have a number for it to be compared.
_MEASURED_LEAST = 0.5
#: The ratio of the standard deviation to the median absolute deviation of a normal distribution.
_MAD_SCALE = 1.4826


class VersionLook(NamedTuple):
    """A point in time at which a test may be decided.

    Attributes:
        runs: the number of runs on each side, without the warm-up.
        chance: the significance level. It is lower than for a single look, because three looks have
            more chances to be wrong.
    """

    runs: int
    chance: float


LOOKS = (VersionLook(7, 0.0030), VersionLook(14, 0.0047), VersionLook(28, 0.0071))


def decide(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    look: VersionLook,
    *,
    numbers: Sequence[str] = NUMBERS,
    tolerance: float = TOLERANCE,
) -> list[NumberFinding]:
    """Return the findings about the durations of one series at a look.

    Further runs may decide those that are *undecided*. A number that less than half of the runs of
    each version have is left out. If this is so for one version only, it is *incomparable*. If a
    version has no runs at all, the only finding is *undecided*.

    A finding about ``full_strength`` is added if the world became whole later than the training
    went on. It is never *undecided*, unless ``numbers`` contains it.

    Args:
        before: earlier runs, one from each turn, without the warm-up.
        after: later runs, likewise.
        numbers: the compared durations, and ratios such as ``recovery / step``.
        tolerance: the growth that counts as worse, as a fraction.
    """
    if not before or not after:
        side = "before" if not before else "after"
        reason = f"no conclusive run {side}"
        return [
            finding_of([*before, *after], "all", "count", NumberChange.UNDECIDED, reason=reason)
        ]
    findings: list[NumberFinding] = []
    for number in numbers:
        shares = [len(samples_of(runs, number)) / len(runs) for runs in (before, after)]
        if min(shares) >= _MEASURED_LEAST:
            findings.append(_decide_number(before, after, look, number, tolerance))
        elif max(shares) >= _MEASURED_LEAST:
            reason = f"{shares[1]:.0%} of the runs have this number, {shares[0]:.0%} before"
            findings.append(
                finding_of(after, number, _unit(number), NumberChange.INCOMPARABLE, reason=reason)
            )
    if record.FULL_STRENGTH not in numbers and is_behind([*before, *after]):
        findings += _decide_strength(before, after, look, tolerance)
    return findings


def _decide_strength(
    before: Sequence[RunRecord], after: Sequence[RunRecord], look: VersionLook, tolerance: float
) -> list[NumberFinding]:
    """Return the finding about full strength if it was not asked for; empty if there is none.

    It is no reason for further runs, so it is never *undecided*.
    """
    for finding in decide(
        before, after, look, numbers=(record.FULL_STRENGTH,), tolerance=tolerance
    ):
        if finding.change is not NumberChange.UNDECIDED:
            return [finding]
        reason = f"{finding.reason or 'too few runs'}; --number {record.FULL_STRENGTH} runs until it is decided"
        return [msgspec.structs.replace(finding, change=NumberChange.INCOMPARABLE, reason=reason)]
    return []


def _decide_number(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    look: VersionLook,
    number: str,
    tolerance: float,
) -> NumberFinding:
    """Return the finding about a number at a look.

    It is *undecided* if fewer than seven runs of a version have the number, or they differ by more
    than 25 %.
    """
    values_before, values_after = samples_of(before, number), samples_of(after, number)
    # an interval of 90 % has 95 % on each side
    ratio = estimate_ratio(values_before, values_after, 0.9)
    fields = {"before": median(values_before), "after": median(values_after), "ratio": ratio}
    if min(len(values_before), len(values_after)) < LOOKS[0].runs:
        counts = f"{len(values_before)} and {len(values_after)} runs have this number"
        reason = f"{counts}; needed: at least {LOOKS[0].runs} of each"
        return finding_of(
            after, number, _unit(number), NumberChange.UNDECIDED, reason=reason, **fields
        )
    if (noise := spread(values_before, values_after)) > SPREAD_MOST:
        reason = f"runs of one version differ by {noise:.0%}, more than {SPREAD_MOST:.0%}"
        return finding_of(
            after, number, _unit(number), NumberChange.UNDECIDED, reason=reason, **fields
        )
    finding = finding_of(
        after, number, _unit(number), judge(ratio, tolerance, look.chance), **fields
    )
    return with_phase(finding, before, after)


def with_phase(
    finding: NumberFinding, before: Sequence[RunRecord], after: Sequence[RunRecord]
) -> NumberFinding:
    """Return a finding with the phase that grew, if it says that recoveries take longer."""
    if finding.change is not NumberChange.REGRESSED or finding.metric != record.RECOVERY:
        return finding
    phase = grown_phase(before, after)
    reason = (
        "more than one of its phases grew"
        if phase == WHOLE
        else f"the phase {phase} grew"
        if phase
        else ""
    )
    return msgspec.structs.replace(finding, phase=phase, reason=reason)


def _unit(number: str) -> Unit:
    """Return the unit of a number or of a ratio."""
    return "ratio" if "/" in number else record.KNOWN[number][0]


def spread(*samples: Sequence[float]) -> float:
    """Return the relative spread of the values within samples; infinity if they are too small.

    One slow run in ten changes it little. It is the standard deviation of the logarithms, estimated
    from the differences of consecutive values, because a drift affects both versions (von Neumann,
    1941). The median is used instead of the mean, as one slow run is in two differences.
    """
    steps = [abs(math.log(late / early)) for values in samples for early, late in pairwise(values)]
    return _MAD_SCALE * median(steps) / math.sqrt(2) if steps else math.inf


def require_numbers(names: Sequence[str], field: str) -> tuple[str, ...]:
    """Return normalized names of durations or ratios; :data:`NUMBERS` if none are given.

    Raises:
        BadInput: if a name is no duration and no ratio of two.
    """
    durations = [name for name, (unit, _) in record.KNOWN.items() if unit == "s"]
    normalized_names = [" / ".join(part.strip() for part in name.split("/")) for name in names]
    for normalized_name in normalized_names:
        parts = normalized_name.split(" / ")
        if len(parts) > 2 or not all(part in durations for part in parts):
            raise BadInput(
                field,
                normalized_name,
                f"name a duration, or a quotient of two: {', '.join(durations)}",
            )
    return tuple(normalized_names) or NUMBERS


def is_decided(findings: Sequence[NumberFinding]) -> bool:
    """Return True if no further run can change the findings: none is *undecided*."""
    return all(finding.change is not NumberChange.UNDECIDED for finding in findings)
