"""One run as a history keeps it: what it was, where it ran, and what it has measured."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Literal
from uuid import UUID

import msgspec

from chaoskit.experiment.outcome import Outcome, Recovery
from chaoskit.vocabulary import RECOVERY_PHASES, Verdict

#: Of every record that is written; records of earlier versions are read for ever.
VERSION = 1

Unit = Literal["s", "steps", "ratio", "count"]
Better = Literal["lower", "higher", ""]

RECOVERED, LOST_STEPS, FALSE_ALARMS, LOSSES_EQUAL = "recovered", "lost_steps", "false_alarms", "losses_equal"
RECOVERY, STEP, BOUND = "recovery", "step", "bound"
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
        claimed: False where a test judges its run by itself.
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


HistoryRecord = RunRecord | SeriesRecord


def new_id() -> str:
    """A UUID of version 7: names that are made later sort later, and no two writers make the same (RFC 9562)."""
    made = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    made = made & ~(0xF << 76) | 0x7 << 76
    return str(UUID(int=made & ~(0x3 << 62) | 0x2 << 62))


def metrics_of(outcome: Outcome) -> dict[str, Metric]:
    """What a run has measured. What it does not know is left out.

    ``recovery`` and its phases are of the slowest recovery, in seconds from the fault to the first step that all ranks
    have finished. ``step`` is the median step before that fault, or of all where there was none. ``bound`` is what the
    plain operations alone would take of that recovery.
    """
    return dict(_metrics(outcome))


def _metrics(outcome: Outcome) -> Iterator[tuple[str, Metric]]:
    if outcome.verdict in (Verdict.PASSED, Verdict.FAILED):
        yield RECOVERED, Metric(float(outcome.verdict == Verdict.PASSED), "count", "higher")
    yield LOST_STEPS, Metric(outcome.lost_steps, "steps", "lower")
    if outcome.false_alarms is not None:
        yield FALSE_ALARMS, Metric(outcome.false_alarms, "count", "lower")
    for check in outcome.checks:
        if check.name == _LOSSES and check.verdict in (Verdict.PASSED, Verdict.FAILED):
            yield LOSSES_EQUAL, Metric(float(check.verdict == Verdict.PASSED), "count", "higher")
    slowest = max(outcome.recoveries, key=lambda one: one.seconds, default=None)
    steps = [point.seconds for point in outcome.steps[1:] if point.seconds > 0]
    step_s = slowest.step_seconds if slowest is not None else median(steps) if steps else 0.0
    if step_s > 0:
        yield STEP, Metric(step_s, "s", "lower")
    if slowest is not None:
        yield from _recovery(slowest)
    if missing := [one.seconds for one in outcome.exposures if one.seconds is not None]:
        yield "exposure", Metric(max(missing), "s", "lower")
    if outcome.account is not None:
        yield "goodput", Metric(outcome.account.goodput, "ratio", "higher")
        yield "ettr", Metric(outcome.account.ettr_wall, "ratio", "higher")


def _recovery(slowest: Recovery) -> Iterator[tuple[str, Metric]]:
    yield RECOVERY, Metric(slowest.seconds, "s", "lower")
    for span in slowest.spans:
        if span.name in RECOVERY_PHASES:
            yield f"{RECOVERY}.{span.name.replace(' ', '_')}", Metric(span.seconds, "s", "lower")
    if slowest.full_strength_seconds is not None:
        yield "full_strength", Metric(slowest.full_strength_seconds, "s", "lower")
    if (bound_s := sum(span.reference_s for span in slowest.spans)) > 0:
        yield BOUND, Metric(bound_s, "s", "")
