"""Report on a night compared with the nights before, in the order of importance. Pure.

-> nightly/outcome.py: the sentence and the exit code. nightly/rendering.py: HTML and Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from statistics import median

import msgspec

from chaoskit.errors import BadInput
from chaoskit.history.compare import by_series, with_accepted_findings
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.record import (
    RECOVERED,
    RECOVERY,
    AcceptedRecord,
    NightRecord,
    NightUnit,
    RunRecord,
    came_back,
    passed,
)
from chaoskit.history.store import RunContents, began
from chaoskit.nightly.outcome import has_failed, night_sentence
from chaoskit.sla.judge import Judged, State
from chaoskit.sla.language import parse
from chaoskit.vocabulary import Verdict

#: The number of nights that the curve of a series shows.
NIGHTS_SHOWN = 30
_SOON = timedelta(days=7)


class BrokenLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an SLA that is broken.

    Attributes:
        since: the commits of the last night in which it was not broken, and of the first in which
            it was; "" if there is none.
        replay: the command that replays the latest run that missed the line, as the only element;
            empty without one.
    """

    judged: Judged
    since: tuple[str, str]
    replay: list[str]


class ErrorBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The error budget of an objective: ``allowed`` of ``runs`` may miss it, and ``misses`` did.

    ``allowed`` is a fraction of the runs of the window, and no whole number.
    """

    sla: str
    line: str
    runs: int
    allowed: float
    misses: int

    @property
    def left(self) -> float:
        """The number of runs that may still miss the objective; negative if it is overspent."""
        return self.allowed - self.misses


class WithReplay(msgspec.Struct, frozen=True, kw_only=True):
    """A finding or a failed test, with the command that replays one of its runs; "" if no run was
    kept.
    """

    finding: NumberFinding | None = None
    unit: NightUnit | None = None
    replay: str = ""


class NightPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The recoveries of one series in one night: median, least and greatest, in seconds."""

    day: date
    middle: float
    low: float
    high: float
    runs: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The recoveries of a series over nights, the latest last.

    Attributes:
        points: a point for each of the latest 30 days that have recoveries, the latest last.
        recovered: the number of runs of this night that recovered.
        passed: the number of runs of this night that passed.
        runs: the number of runs of this night.
    """

    series: str
    title: str
    points: list[NightPoint]
    recovered: int
    passed: int
    runs: int


class NightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the report, in their order.

    Attributes:
        before: the night before; None for the first night.
        sentence: a summary of the night.
        broken: broken lines of SLAs.
        regressions: durations and counts that got worse, including accepted ones.
        troubles: tests that failed, and why.
        not_run: planned parts that are missing.
        budgets: the error budgets of objectives.
        expiring: accepted regressions whose acceptance ends within 7 days.
        better: numbers that improved.
        changed: changes of the environment since the night before.
        lines: other lines that must be shown.
        curves: the curve of each series.
        store: the name of the history, for commands.
    """

    night: NightRecord
    before: NightRecord | None
    sentence: str
    broken: list[BrokenLine]
    regressions: list[WithReplay]
    troubles: list[WithReplay]
    not_run: list[str]
    budgets: list[ErrorBudget]
    expiring: list[AcceptedRecord]
    better: list[NumberFinding]
    changed: list[str]
    lines: list[str]
    curves: list[Curve]
    store: str


def build_report(contents: RunContents, store: str, night: str = "") -> NightReport:
    """Return the report on a night.

    Args:
        contents: the records of the history, with this night and earlier ones.
        store: the name of the history, for the commands in the report.
        night: the day, name or commit of a night, or the beginning of its UUID or commit. The
            latest match is taken; "" is the latest night.

    Raises:
        BadInput: if there is no such night.
    """
    record = choose_night(contents.nights, night)
    earlier = [
        night
        for night in contents.nights
        if night.name == record.name and night.started_unix_ns < record.started_unix_ns
    ]
    findings = with_accepted_findings(record.findings, contents.accepted, _day(record))
    record = msgspec.structs.replace(record, findings=findings)
    judged = [msgspec.convert(line, Judged) for line in record.slas]
    return NightReport(
        night=record,
        before=earlier[-1] if earlier else None,
        sentence=night_sentence(record),
        broken=[
            _broken_line(line, [*earlier, record], store)
            for line in judged
            if line.state is State.BROKEN
        ],
        regressions=[
            WithReplay(
                finding=finding,
                replay=_replay_command(
                    store, (run for run in contents.runs if run.series == finding.series)
                ),
            )
            for finding in record.findings
            if finding.change is NumberChange.REGRESSED
        ],
        troubles=[
            WithReplay(
                unit=unit,
                replay=_replay_command(
                    store, (run for run in contents.runs if _explains_failure(run, unit))
                ),
            )
            for unit in record.units
            if has_failed(unit)
        ],
        not_run=record.missing,
        budgets=[budget for line in judged if (budget := _error_budget(line)) is not None],
        expiring=[
            acceptance
            for acceptance in _latest_acceptances(contents.accepted)
            if _day(record) <= acceptance.until <= _day(record) + _SOON
        ],
        better=[finding for finding in record.findings if finding.change is NumberChange.BETTER],
        changed=_environment_changes(record, earlier),
        lines=record.lines,
        curves=_curves(contents, record),
        store=store,
    )


def _latest_acceptances(accepted: Sequence[AcceptedRecord]) -> list[AcceptedRecord]:
    """Return, for each series and number, the acceptance with the latest expiry."""
    latest: dict[tuple[str, str], AcceptedRecord] = {}
    for acceptance in sorted(accepted, key=lambda acceptance: acceptance.until):
        latest[acceptance.series, acceptance.metric] = acceptance
    return list(latest.values())


def choose_night(nights: Sequence[NightRecord], name: str) -> NightRecord:
    """Return the latest night, or the latest one that a name selects.

    Raise BadInput if there is none.

    Args:
        nights: the nights, sorted by their start.
        name: a day, name, commit or UUID, or the beginning of a UUID or commit; "" for any night.
    """
    if not nights:
        raise BadInput("night", name, "name a history with nights: chaoskit nightly run adds them")
    if not name:
        return nights[-1]
    matching = [
        record
        for record in nights
        if name in (str(_day(record)), record.name, record.night, record.commit)
    ]
    matching = matching or [record for record in nights if record.night.startswith(name)]
    matching = matching or [record for record in nights if record.commit.startswith(name)]
    if not matching:
        choices = ", ".join(f"{_day(record)} ({record.night[:13]})" for record in nights[-5:])
        raise BadInput("night", name, f"name a night by its day, its commit or its UUID: {choices}")
    return matching[-1]


def _day(night: NightRecord) -> date:
    """Return the UTC day on which a night began."""
    return datetime.fromtimestamp(night.started_unix_ns / 1e9, UTC).date()


def _broken_line(judged: Judged, nights: Sequence[NightRecord], store: str) -> BrokenLine:
    """Return a broken line with the commits between which it broke, and a command for replay."""
    last_good, first_bad = "", nights[-1].commit
    for night in reversed(nights):
        states = [
            line["state"]
            for line in night.slas
            if (line["sla"], line["line"]) == (judged.sla, judged.line)
        ]
        if states and State.BROKEN not in states:
            last_good = night.commit
            break
        first_bad = night.commit if states else first_bad
    replay = [f"chaoskit replay --history {store} {run}" for run in judged.missed[-1:]]
    return BrokenLine(judged=judged, since=(last_good, first_bad), replay=replay)


def _replay_command(store: str, runs: Iterable[RunRecord]) -> str:
    """Return the command that replays the latest of some runs; "" if there is none."""
    run_ids = [run.run_id for run in runs]
    return f"chaoskit replay --history {store} {run_ids[-1]}" if run_ids else ""


def _explains_failure(run: RunRecord, unit: NightUnit) -> bool:
    """Return True if a run belongs to a test and explains its failure.

    This is so if the run did not pass. If all runs of the test passed, its own assertion failed,
    and each of them explains it.
    """
    is_of_test = run.title.partition(" #")[0] == unit.test
    return is_of_test and (
        run.verdict is not Verdict.PASSED or set(unit.verdicts) <= {Verdict.PASSED}
    )


def removed_tests(record: NightRecord, earlier: Sequence[NightRecord]) -> list[str]:
    """Return a line for each test of the night before that is no part of this night.

    A night that ended early had no time for them, so there are no lines. Tests that ``missing`` of
    the record explains have none either.
    """
    if not earlier or record.reason:
        return []
    now = {f"{unit.part}: {unit.test}" for unit in record.units}
    before = dict.fromkeys(f"{unit.part}: {unit.test}" for unit in earlier[-1].units)
    return [
        f"{name}: it ran in the night before, and is not part of this night"
        for name in before
        if name not in now and not any(line.startswith(f"{name}: ") for line in record.missing)
    ]


def _error_budget(judged: Judged) -> ErrorBudget | None:
    """Return the error budget of an objective; None for other lines, and without runs."""
    try:
        condition = parse(judged.line, "line")
    except BadInput:  # the line is about a regression
        return None
    if not condition.is_objective or not judged.runs:
        return None
    allowed = (1 - condition.share) * judged.runs
    return ErrorBudget(
        sla=judged.sla, line=judged.line, runs=judged.runs, allowed=allowed, misses=judged.misses
    )


def _environment_changes(record: NightRecord, earlier: Sequence[NightRecord]) -> list[str]:
    """Return a line for each property of the environment that differs from the night before.

    The first night has no lines.
    """
    if not earlier:
        return []
    before, now = earlier[-1].environment, record.environment
    names = sorted(before.keys() | now.keys())
    return [
        f"{name}: {now.get(name, 'absent')} (was {before.get(name, 'absent')})"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _curves(contents: RunContents, record: NightRecord) -> list[Curve]:
    """Return a curve for each series of this night's experiments; later nights are left out."""
    sessions_tonight = {
        unit.session for unit in record.units if unit.part == "experiments" and unit.session
    }
    days = {unit.session: _day(night) for night in contents.nights for unit in night.units}
    curves = []
    for (series, _), runs in by_series(contents.runs).items():
        runs_tonight = [run for run in runs if run.session in sessions_tonight and run.claimed]
        if not runs_tonight:
            continue
        shown = [
            run for run in runs if run.session <= max(sessions_tonight)
        ]  # names of sessions sort by time
        points = _points(shown, days)[-NIGHTS_SHOWN:]
        recovered = sum(
            bool(run.metrics[RECOVERED].value) for run in runs_tonight if RECOVERED in run.metrics
        )
        counts = {
            "recovered": recovered,
            "passed": sum(map(passed, runs_tonight)),
            "runs": len(runs_tonight),
        }
        curves.append(Curve(series=series, title=runs_tonight[-1].title, points=points, **counts))
    return sorted(curves, key=lambda curve: curve.title)


def _points(runs: Sequence[RunRecord], days: Mapping[str, date]) -> list[NightPoint]:
    """Return the median, least and greatest recovery of each day, sorted by day.

    A run belongs to the day on which its night began, or its session if it is part of no night.
    """
    by_day: dict[date, list[float]] = {}
    for run in runs:
        if RECOVERY in run.metrics and came_back(run):
            day = days.get(run.session) or began(run.session).date()
            by_day.setdefault(day, []).append(run.metrics[RECOVERY].value)
    return [
        NightPoint(
            day=day, middle=median(values), low=min(values), high=max(values), runs=len(values)
        )
        for day, values in sorted(by_day.items())
    ]
