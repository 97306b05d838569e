"""Records of a history: runs with their numbers, plans of series, accepted regressions, nights.

-> history/session.py: records made of the outcomes of runs. history/store.py: files of records.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import date
from statistics import median
from typing import Any, Literal
from uuid import UUID

import msgspec

from chaoskit.history.finding import NumberFinding, Unit
from chaoskit.runlog.outcome import Outcome, Recovery
from chaoskit.vocabulary import RECOVERY_PHASES, Verdict

#: The format version of new records. Records of earlier versions stay readable for ever.
VERSION = 1

Better = Literal["lower", "higher", ""]

RECOVERED, LOST_STEPS, FALSE_ALARMS, LOSSES_EQUAL = (
    "recovered",
    "lost_steps",
    "false_alarms",
    "losses_equal",
)
PASSED = "passed"
RECOVERY, STEP, BOUND = "recovery", "step", "bound"
FULL_STRENGTH = "full_strength"
_LOSSES = "losses equal the twin's"


class Metric(msgspec.Struct, frozen=True):
    """A number that a run has measured.

    Attributes:
        value: the number in its unit. A yes is 1 and a no is 0.
        better: which direction is an improvement; "" if neither is.
    """

    value: float
    unit: Unit
    better: Better


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """A run. Runs are stored one by one and are never averaged first.

    Attributes:
        run_id: a UUID that begins with the time (version 7).
        session: the UUID of the session, which all its runs share; "" until it is added to one.
        started_unix_ns: the time of its start; 0 if unknown.
        series: equal for runs of one experiment; see :func:`chaoskit.history.series.series_of`.
        definition: is raised by hand when the same experiment begins to measure something else.
        title: the title of the test, without the number of a repeat. The second run of a test and
            later ones have the suffix `` #2`` and so on.
        machine: the hardware that the durations depend on.
        commit: the commit of the user's sources; "" outside of a repository.
        claimed: False if a test judges its run by itself.
        test_failed: True if an assertion of the test failed after the run.
        came_back: True if the training went on after every incident; None if that is not known.
        faults: the kinds of the faults that were asked for.
        metrics: its numbers by name; see :data:`KNOWN`.
        covariates: facts that may explain a difference: versions, load, whether the sources were
            changed.
        report: the directory of the run, on the machine where it was made.
    """

    version: int = VERSION
    run_id: str
    session: str
    started_unix_ns: int
    series: str
    definition: int = 1
    title: str
    machine: str
    commit: str = ""
    seed: int
    verdict: Verdict
    claimed: bool = True
    test_failed: bool = False
    came_back: bool | None = None
    stack: str
    faults: list[str]
    metrics: dict[str, Metric]
    covariates: dict[str, str] = {}
    report: str = ""


class SeriesRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="series"):
    """The part of a plan that all runs of a series share.

    With a seed, it is enough to run one again.
    """

    version: int = VERSION
    series: str
    plan: dict[str, Any]


class AcceptedRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="accepted"):
    """A statement that a series may be worse than it was, and the reason why that is no failure.

    Attributes:
        metric: the number that is worse; "" for all numbers.
        until: the last day on which the statement applies, in UTC.
        by: its author, as user@host.
    """

    version: int = VERSION
    series: str
    metric: str = ""
    reason: str
    until: date
    by: str


class NightUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A test in one part of a night.

    Attributes:
        runs: the number of runs that were made.
        verdicts: the number of runs of each verdict, without those that the test judges itself.
        failures: the number of repeats in which the test failed although all their runs passed.
        troubles: the reasons of failures and skips, each once.
        session: the session of the runs in the history; "" for a comparison.
        why_not: why the test did not run, or not as often as planned; "" if it ran in full.
    """

    part: Literal["control", "experiments", "comparison"]
    test: str
    runs: int = 0
    verdicts: dict[Verdict, int] = {}
    failures: int = 0
    troubles: list[str] = []
    session: str = ""
    seconds: float = 0.0
    why_not: str = ""


class NightRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="night"):
    """A night of experiments, written when the night is over.

    Attributes:
        night: its UUID.
        name: the name of its plan.
        commit: the tested commit.
        is_changed: True if files differed from the commit.
        seconds: the duration of all tests, and of the work around them since the night was last
            started or resumed.
        exit_code: the exit code of the command.
        reason: why it ended early; "" if it did not.
        units: the tests that were complete.
        against: the version that it was compared with; "" without a comparison.
        findings: the findings of the comparison with ``against``.
        slas: lines with their states, as :class:`chaoskit.sla.judge.Judged` in JSON values.
        missing: planned tests that did not run, each with the reason.
        environment: facts that may explain a difference between nights.
        lines: other lines that must be shown, such as resources that were left behind.
    """

    version: int = VERSION
    night: str
    name: str
    commit: str = ""
    is_changed: bool = False
    started_unix_ns: int
    seconds: float
    exit_code: int
    reason: str = ""
    units: list[NightUnit] = []
    against: str = ""
    findings: list[NumberFinding] = []
    slas: list[dict[str, Any]] = []
    missing: list[str] = []
    environment: dict[str, str] = {}
    lines: list[str] = []


HistoryRecord = RunRecord | SeriesRecord | AcceptedRecord | NightRecord


def new_id() -> str:
    """Return a new UUID of version 7 (RFC 9562).

    UUIDs of later milliseconds sort later, and no two writers make the same.
    """
    bits = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    bits = bits & ~(0xF << 76) | 0x7 << 76
    return str(UUID(int=bits & ~(0x3 << 62) | 0x2 << 62))


def came_back(run: RunRecord) -> bool:
    """Return True if the training went on after every incident.

    A run whose ``assert_recovered`` failed may have come back. Earlier records do not contain the
    fact: such a run came back if it passed or if it counts as recovered.
    """
    if run.came_back is not None:
        return run.came_back
    recovered = run.metrics.get(RECOVERED)
    return run.verdict is Verdict.PASSED or (recovered is not None and bool(recovered.value))


def passed(run: RunRecord) -> bool:
    """Return True if a run and its test passed.

    A record without the number ``passed`` is judged by the verdict of the run.
    """
    metric = run.metrics.get(PASSED)
    return run.verdict is Verdict.PASSED if metric is None else bool(metric.value)


def metrics_of(outcome: Outcome) -> dict[str, Metric]:
    """Return the numbers that a run has measured, as far as they are known.

    ``recovery`` and its phases describe the slowest recovery, in seconds from the fault to the
    first step that all ranks have finished. ``step`` is the median step before that fault, or of
    all steps if there was no fault. ``bound`` is the part of that recovery that its plain
    operations alone would take. ``exposure`` is the longest time in
    which a piece of a sharded state lacked copies, in seconds.
    """
    return {
        name: Metric(value, *KNOWN[name]) for name, value in _metrics(outcome) if value is not None
    }


def _metrics(outcome: Outcome) -> Iterator[tuple[str, float | None]]:
    """Yield each number with its value, which is None if it was not measured."""
    yield RECOVERED, None if outcome.recovered is None else float(outcome.recovered)
    if outcome.verdict in (Verdict.PASSED, Verdict.FAILED):
        yield PASSED, float(outcome.result == Verdict.PASSED)
    yield LOST_STEPS, outcome.lost_steps
    yield FALSE_ALARMS, outcome.false_alarms
    for check in outcome.checks:
        if check.name == _LOSSES and check.verdict in (Verdict.PASSED, Verdict.FAILED):
            yield LOSSES_EQUAL, float(check.verdict == Verdict.PASSED)
    slowest = max(outcome.recoveries, key=lambda recovery: recovery.seconds, default=None)
    steps = [point.seconds for point in outcome.steps[1:] if point.seconds > 0]
    yield (
        STEP,
        (slowest.step_seconds if slowest is not None else median(steps) if steps else 0.0) or None,
    )
    if slowest is not None:
        yield from _recovery(slowest)
    yield (
        "exposure",
        max(
            (recovery.seconds for recovery in outcome.exposures if recovery.seconds is not None),
            default=None,
        ),
    )
    if outcome.account is not None:
        yield "goodput", outcome.account.goodput
        yield "ettr", outcome.account.ettr_wall


def _recovery(slowest: Recovery) -> Iterator[tuple[str, float | None]]:
    """Yield the total, phases, full strength and bound of the slowest recovery."""
    yield RECOVERY, slowest.seconds
    for span in slowest.spans:
        yield phase_name(span.name), span.seconds
    yield FULL_STRENGTH, slowest.full_strength_seconds
    yield BOUND, sum(span.reference_s for span in slowest.spans) or None


def phase_name(phase: str) -> str:
    """Return the name of the number that holds the length of a phase of a recovery."""
    return f"{RECOVERY}.{phase.replace(' ', '_')}"


#: The numbers that a run may have: the unit of each, and which direction is better.
KNOWN: dict[str, tuple[Unit, Better]] = {
    RECOVERED: ("count", "higher"),
    PASSED: ("count", "higher"),
    LOST_STEPS: ("steps", "lower"),
    FALSE_ALARMS: ("count", "lower"),
    LOSSES_EQUAL: ("count", "higher"),
    RECOVERY: ("s", "lower"),
    **{phase_name(phase): ("s", "lower") for phase in RECOVERY_PHASES},
    FULL_STRENGTH: ("s", "lower"),
    "exposure": ("s", "lower"),
    STEP: ("s", "lower"),
    BOUND: ("s", ""),
    "goodput": ("ratio", "higher"),
    "ettr": ("ratio", "higher"),
}
