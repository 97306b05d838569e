"""What a night has shown beside the nights before it, in the order in which people must see it. Pure."""

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

#: Nights of a series that are drawn.
NIGHTS_SHOWN = 30
_SOON = timedelta(days=7)


class BrokenLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an SLA that is broken. ``since``: commits of the last night in which it was not, and of the first in
    which it was; "" where there is none.
    """

    judged: Judged
    since: tuple[str, str]
    replay: list[str]


class ErrorBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What an objective still allows: of ``runs`` in its window, ``allowed`` may miss it, and ``misses`` did."""

    sla: str
    line: str
    runs: int
    allowed: float
    misses: int

    @property
    def left(self) -> float:
        """How many runs may still miss it."""
        return self.allowed - self.misses


class WithReplay(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, or a test that failed, with the command that runs one of its runs again; "" where none was kept."""

    finding: NumberFinding | None = None
    unit: NightUnit | None = None
    replay: str = ""


class NightPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Recoveries of one series in one night: the median, the least and the greatest, in seconds."""

    day: date
    middle: float
    low: float
    high: float
    runs: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """A series over nights, the latest last."""

    series: str
    title: str
    points: list[NightPoint]
    recovered: int
    passed: int
    runs: int


class NightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the report, in their order.

    Attributes:
        sentence: all of it in one. broken: SLA lines. regressions: durations and counts that got worse.
        not_run: what was planned and is not there. budgets: of objectives. expiring: accepted regressions that soon
            fail again. better: what improved. changed: of the environment, since the night before.
        troubles: tests that failed, with why. lines: what else people must see. curves: of each series.
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
    """The report on a night: the latest, or the latest whose day, name or commit is this, or begins so.

    Raises:
        BadInput: if there is no such night.
    """
    record = choose_night(contents.nights, night)
    earlier = [
        one
        for one in contents.nights
        if one.name == record.name and one.started_unix_ns < record.started_unix_ns
    ]
    findings = with_accepted_findings(record.findings, contents.accepted, _day(record))
    record = msgspec.structs.replace(record, findings=findings)
    judged = [msgspec.convert(one, Judged) for one in record.slas]
    return NightReport(
        night=record,
        before=earlier[-1] if earlier else None,
        sentence=night_sentence(record),
        broken=[
            _broken(one, [*earlier, record], store) for one in judged if one.state is State.BROKEN
        ],
        regressions=[
            WithReplay(
                finding=one,
                replay=_replay(store, (run for run in contents.runs if run.series == one.series)),
            )
            for one in record.findings
            if one.change is NumberChange.REGRESSED
        ],
        troubles=[
            WithReplay(
                unit=unit,
                replay=_replay(store, (run for run in contents.runs if _has_missed(run, unit))),
            )
            for unit in record.units
            if has_failed(unit)
        ],
        not_run=record.missing,
        budgets=[budget for one in judged if (budget := _budget(one)) is not None],
        expiring=[
            one
            for one in _latest(contents.accepted)
            if _day(record) <= one.until <= _day(record) + _SOON
        ],
        better=[one for one in record.findings if one.change is NumberChange.BETTER],
        changed=_changed(record, earlier),
        lines=record.lines,
        curves=_curves(contents, record),
        store=store,
    )


def _latest(accepted: Sequence[AcceptedRecord]) -> list[AcceptedRecord]:
    """Of what was accepted more than once, the one that lasts longest."""
    found: dict[tuple[str, str], AcceptedRecord] = {}
    for one in sorted(accepted, key=lambda one: one.until):
        found[one.series, one.metric] = one
    return list(found.values())


def choose_night(nights: Sequence[NightRecord], name: str) -> NightRecord:
    """The latest night, or the one that is named. Raises BadInput."""
    if not nights:
        raise BadInput(
            "night", name, "there is none in this history: chaoskit nightly run makes one"
        )
    if not name:
        return nights[-1]
    found = [
        record
        for record in nights
        if name in (str(_day(record)), record.name, record.night, record.commit)
    ]
    found = found or [record for record in nights if record.night.startswith(name)]
    found = found or [record for record in nights if record.commit.startswith(name)]
    if not found:
        known = ", ".join(f"{_day(one)} ({one.night[:13]})" for one in nights[-5:])
        raise BadInput("night", name, f"name one by its day, its commit or its beginning: {known}")
    return found[-1]


def _day(night: NightRecord) -> date:
    return datetime.fromtimestamp(night.started_unix_ns / 1e9, UTC).date()


def _broken(judged: Judged, nights: Sequence[NightRecord], store: str) -> BrokenLine:
    last_good, first_bad = "", nights[-1].commit
    for night in reversed(nights):
        states = [
            one["state"]
            for one in night.slas
            if (one["sla"], one["line"]) == (judged.sla, judged.line)
        ]
        if states and State.BROKEN not in states:
            last_good = night.commit
            break
        first_bad = night.commit if states else first_bad
    replay = [f"chaoskit replay --history {store} {run}" for run in judged.missed[-1:]]
    return BrokenLine(judged=judged, since=(last_good, first_bad), replay=replay)


def _replay(store: str, runs: Iterable[RunRecord]) -> str:
    """The command that runs the latest of some runs again; "" where there is none."""
    found = [run.run_id for run in runs]
    return f"chaoskit replay --history {store} {found[-1]}" if found else ""


def _has_missed(run: RunRecord, unit: NightUnit) -> bool:
    """Whether a run is of a test, and did not pass: or of a test whose runs did, and whose own assertion failed."""
    is_its = run.title.partition(" #")[0] == unit.test
    return is_its and (run.verdict is not Verdict.PASSED or set(unit.verdicts) <= {Verdict.PASSED})


def gone(record: NightRecord, earlier: Sequence[NightRecord]) -> list[str]:
    """Tests of the night before that are no part of this one, in any way. One that ended early had no time for them."""
    if not earlier or record.reason:
        return []
    now = {f"{unit.part}: {unit.test}" for unit in record.units}
    before = dict.fromkeys(f"{unit.part}: {unit.test}" for unit in earlier[-1].units)
    return [
        f"{name}: it ran in the night before, and is not there any more"
        for name in before
        if name not in now and not any(line.startswith(f"{name}: ") for line in record.missing)
    ]


def _budget(judged: Judged) -> ErrorBudget | None:
    try:
        condition = parse(judged.line, "line")
    except BadInput:  # a line about a regression
        return None
    if not condition.is_objective or not judged.runs:
        return None
    allowed = (1 - condition.share) * judged.runs
    return ErrorBudget(
        sla=judged.sla, line=judged.line, runs=judged.runs, allowed=allowed, misses=judged.misses
    )


def _changed(record: NightRecord, earlier: Sequence[NightRecord]) -> list[str]:
    if not earlier:
        return []
    before, now = earlier[-1].environment, record.environment
    names = sorted(before.keys() | now.keys())
    return [
        f"{name}: {now.get(name, 'gone')} (was {before.get(name, 'not there')})"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _curves(contents: RunContents, record: NightRecord) -> list[Curve]:
    """Of the series that ran in this night, up to it."""
    tonight = {unit.session for unit in record.units if unit.part == "experiments" and unit.session}
    days = {unit.session: _day(night) for night in contents.nights for unit in night.units}
    found = []
    for (series, _), runs in by_series(contents.runs).items():
        mine = [run for run in runs if run.session in tonight and run.claimed]
        if not mine:
            continue
        shown = [run for run in runs if run.session <= max(tonight)]  # their names sort by time
        points = _points(shown, days)[-NIGHTS_SHOWN:]
        recovered = sum(
            bool(run.metrics[RECOVERED].value) for run in mine if RECOVERED in run.metrics
        )
        counts = {"recovered": recovered, "passed": sum(map(passed, mine)), "runs": len(mine)}
        found.append(Curve(series=series, title=mine[-1].title, points=points, **counts))
    return sorted(found, key=lambda curve: curve.title)


def _points(runs: Sequence[RunRecord], days: Mapping[str, date]) -> list[NightPoint]:
    """By the day on which a night began; of other sessions, by their own."""
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
