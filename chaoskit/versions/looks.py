"""When runs that take turns have decided about a test, and how. Pure.

A comparison of two sessions cannot tell a slower program from a slower day. Here both versions run in turns, so the day
is the same for both, and seconds can be compared. What is found is looked at three times, because most questions are
answered by few runs. How often that is right on recorded recoveries is in ``benchmarks/results/decisions.md``.
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
from chaoskit.history.ranks import estimate_ratio
from chaoskit.history.record import RunRecord
from chaoskit.versions.phases import grown_phase

#: How much longer something may take before it counts as worse. A change of just this size is mostly *undecided*.
TOLERANCE = 0.10
#: A number by which runs of one version differ by more than this share does not decide: its ratio would be luck.
SPREAD_MOST = 0.25
#: What is compared of each test, where it has it.
NUMBERS = (record.RECOVERY, record.STEP, record.phase_name("restored"))
#: A number that fewer of the runs have says nothing of them.
_MEASURED_LEAST = 0.5
#: Values of a normal distribution lie about this many times their median distance from the middle.
_OF_NORMAL = 1.4826


class VersionLook(NamedTuple):
    """A moment at which runs may decide.

    Attributes:
        runs: on each side. chance: what looks worse by chance in more cases than this is not called so. Three looks
            have more chances to be wrong than one, so each has less.
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
    """What durations of one series say at a look. *Undecided* is what further runs may decide.

    Args:
        before, after: one run of each in a turn, without the first ones, which warm up.
    """
    if not before or not after:
        side = "before" if not before else "after"
        reason = f"no run {side} says anything of it"
        return [
            finding_of([*before, *after], "all", "count", NumberChange.UNDECIDED, reason=reason)
        ]
    found: list[NumberFinding] = []
    for number in numbers:
        shares = [len(samples_of(runs, number)) / len(runs) for runs in (before, after)]
        if min(shares) >= _MEASURED_LEAST:
            found.append(_decide_number(before, after, look, number, tolerance))
        elif max(shares) >= _MEASURED_LEAST:
            reason = f"{shares[1]:.0%} of the runs have it, {shares[0]:.0%} before"
            found.append(
                finding_of(after, number, _unit(number), NumberChange.INCOMPARABLE, reason=reason)
            )
    if record.FULL_STRENGTH not in numbers and is_behind([*before, *after]):
        found += _decide_strength(before, after, look, tolerance)
    return found


def _decide_strength(
    before: Sequence[RunRecord], after: Sequence[RunRecord], look: VersionLook, tolerance: float
) -> list[NumberFinding]:
    """What full strength says, where it is no number that was asked for: it is no reason to run more often."""
    for found in decide(before, after, look, numbers=(record.FULL_STRENGTH,), tolerance=tolerance):
        if found.change is not NumberChange.UNDECIDED:
            return [found]
        reason = f"{found.reason or 'too few runs'}; --number {record.FULL_STRENGTH} runs until it is decided"
        return [msgspec.structs.replace(found, change=NumberChange.INCOMPARABLE, reason=reason)]
    return []


def _decide_number(
    before: Sequence[RunRecord],
    after: Sequence[RunRecord],
    look: VersionLook,
    number: str,
    tolerance: float,
) -> NumberFinding:
    early, late = samples_of(before, number), samples_of(after, number)
    ratio = estimate_ratio(early, late, 0.9)  # 95 % on each side
    told = {"before": median(early), "after": median(late), "ratio": ratio}
    if min(len(early), len(late)) < LOOKS[0].runs:
        reason = (
            f"{len(early)} and {len(late)} runs have it: {LOOKS[0].runs} each at least can decide"
        )
        return finding_of(
            after, number, _unit(number), NumberChange.UNDECIDED, reason=reason, **told
        )
    if (noise := spread(early, late)) > SPREAD_MOST:
        reason = f"runs of one version differ by {noise:.0%}: beyond {SPREAD_MOST:.0%} time does not decide"
        return finding_of(
            after, number, _unit(number), NumberChange.UNDECIDED, reason=reason, **told
        )
    found = finding_of(after, number, _unit(number), judge(ratio, tolerance, look.chance), **told)
    return with_phase(found, before, after)


def with_phase(
    found: NumberFinding, before: Sequence[RunRecord], after: Sequence[RunRecord]
) -> NumberFinding:
    """The finding with the phase that grew, where it is that recoveries take longer."""
    if found.change is not NumberChange.REGRESSED or found.metric != record.RECOVERY:
        return found
    phase = grown_phase(before, after)
    reason = (
        "more than one of its phases grew"
        if phase == WHOLE
        else f"the phase {phase} grew"
        if phase
        else ""
    )
    return msgspec.structs.replace(found, phase=phase, reason=reason)


def _unit(number: str) -> Unit:
    return "ratio" if "/" in number else record.KNOWN[number][0]


def spread(*samples: Sequence[float]) -> float:
    """By which share values of one sample differ from each other: robust, so that one slow run in ten changes little.

    The standard deviation of their logarithms, from the differences of consecutive ones, as a drift is the same for
    both versions (von Neumann, 1941; by the median here, as one slow run is in two differences).
    """
    steps = [abs(math.log(late / early)) for values in samples for early, late in pairwise(values)]
    return _OF_NORMAL * median(steps) / math.sqrt(2) if steps else math.inf


def require_numbers(given: Sequence[str], field: str) -> tuple[str, ...]:
    """Names of durations, or of quotients of two, as they are compared; :data:`NUMBERS` where none is given.

    Raises:
        BadInput: if one is none.
    """
    durations = [known for known, (unit, _) in record.KNOWN.items() if unit == "s"]
    found = [" / ".join(part.strip() for part in name.split("/")) for name in given]
    for name in found:
        parts = name.split(" / ")
        if len(parts) > 2 or not all(part in durations for part in parts):
            raise BadInput(
                field, name, f"name a duration, or a quotient of two: {', '.join(durations)}"
            )
    return tuple(found) or NUMBERS


def is_decided(findings: Sequence[NumberFinding]) -> bool:
    """Whether no further run can change what was found."""
    return all(one.change is not NumberChange.UNDECIDED for one in findings)
