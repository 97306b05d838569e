"""One run as a history keeps it: what it was, where it ran, and what it has measured."""

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

#: Of every record that is written; records of earlier versions are read for ever.
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
    """One number that a run has shown. ``better``: which way is; "" where neither."""

    value: float
    unit: Unit
    better: Better


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """One run. It is never averaged with others before it is stored.

    Attributes:
        run_id: a UUID that begins with the time (version 7). session: that of all runs of one session.
        series: equal for runs of one experiment; see :func:`chaoskit.history.series.series_of`.
        definition: raised by hand where the same experiment measures something else from now on.
        title: of the test, without the number of a repeat.
        machine: what seconds depend on. commit: of the user's sources; "" outside of a repository.
        claimed: False where a test judges its run by itself. test_failed: an assertion of the test failed after it.
        came_back: whether the training went on after every incident; None where that is not known.
        faults: as they were asked for, before roles were drawn.
        covariates: what may explain a difference: versions, load, whether the sources were changed.
        report: directory of the run, where it was made.
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
    """What all runs of a series have in common: with its plan and a seed one of them is run again."""

    version: int = VERSION
    series: str
    plan: dict[str, Any]


class AcceptedRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="accepted"):
    """That a series is slower than it was, and why that is no failure.

    Attributes:
        metric: the number that is worse; "" for each of them. until: the last day of it, in UTC. by: user@host.
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
        runs: that were made. failures: in how many an assertion of the test failed, and their runs passed. troubles:
            why some failed, each once. why_not: why it did not run, or not as often as it should; "" where it did.
        session: of its runs, in the history.
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
    """A night of experiments, when it was over.

    Attributes:
        night: its UUID. name: that of its plan. commit: what it has tested. is_changed: whether files differed from it.
        seconds: of tests, and of what is around them since it went on after a kill. exit_code: as of the command.
        reason: why it ended early; "" where it did not.
        findings: of its comparison with ``against``, a commit. slas: lines with their states.
        missing: what was planned and did not run, and why. environment: what may explain a difference to other nights.
        lines: further ones that people must see, such as what was left behind.
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
    """A UUID of version 7: names that are made later sort later, and no two writers make the same (RFC 9562)."""
    made = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    made = made & ~(0xF << 76) | 0x7 << 76
    return str(UUID(int=made & ~(0x3 << 62) | 0x2 << 62))


def came_back(run: RunRecord) -> bool:
    """Return whether the training went on after every incident.

    A run whose ``assert_recovered`` failed may have come back. Earlier records do not say it: of these, runs that
    passed did, and those that count as recovered.
    """
    if run.came_back is not None:
        return run.came_back
    recovered = run.metrics.get(RECOVERED)
    return run.verdict is Verdict.PASSED or (recovered is not None and bool(recovered.value))


def passed(run: RunRecord) -> bool:
    """Return whether a run and its test passed; of a record without that number, whether the run did."""
    found = run.metrics.get(PASSED)
    return run.verdict is Verdict.PASSED if found is None else bool(found.value)


def metrics_of(outcome: Outcome) -> dict[str, Metric]:
    """What a run has measured, as far as it is known.

    ``recovery`` and its phases are of the slowest recovery, in seconds from the fault to the first step that all ranks
    have finished. ``step`` is the median step before that fault, or of all where there was none. ``bound`` is what the
    plain operations alone would take of that recovery.
    """
    return {
        name: Metric(value, *KNOWN[name]) for name, value in _metrics(outcome) if value is not None
    }


def _metrics(outcome: Outcome) -> Iterator[tuple[str, float | None]]:
    yield RECOVERED, None if outcome.recovered is None else float(outcome.recovered)
    if outcome.verdict in (Verdict.PASSED, Verdict.FAILED):
        yield PASSED, float(outcome.result == Verdict.PASSED)
    yield LOST_STEPS, outcome.lost_steps
    yield FALSE_ALARMS, outcome.false_alarms
    for check in outcome.checks:
        if check.name == _LOSSES and check.verdict in (Verdict.PASSED, Verdict.FAILED):
            yield LOSSES_EQUAL, float(check.verdict == Verdict.PASSED)
    slowest = max(outcome.recoveries, key=lambda one: one.seconds, default=None)
    steps = [point.seconds for point in outcome.steps[1:] if point.seconds > 0]
    yield (
        STEP,
        (slowest.step_seconds if slowest is not None else median(steps) if steps else 0.0) or None,
    )
    if slowest is not None:
        yield from _recovery(slowest)
    yield (
        "exposure",
        max((one.seconds for one in outcome.exposures if one.seconds is not None), default=None),
    )
    if outcome.account is not None:
        yield "goodput", outcome.account.goodput
        yield "ettr", outcome.account.ettr_wall


def _recovery(slowest: Recovery) -> Iterator[tuple[str, float | None]]:
    yield RECOVERY, slowest.seconds
    for span in slowest.spans:
        yield phase_name(span.name), span.seconds
    yield FULL_STRENGTH, slowest.full_strength_seconds
    yield BOUND, sum(span.reference_s for span in slowest.spans) or None


def phase_name(phase: str) -> str:
    """The number that is the length of a phase of a recovery."""
    return f"{RECOVERY}.{phase.replace(' ', '_')}"


#: The numbers that a run may have: their units, and which way is better.
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
