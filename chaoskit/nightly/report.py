"""What a night has shown beside the nights before it, in the order in which people must see it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from statistics import median

import msgspec

from chaoskit.errors import BadInput
from chaoskit.history.compare import by_series, with_accepted_findings
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.record import RECOVERY, AcceptedRecord, NightRecord, NightUnit, RunRecord
from chaoskit.history.store import Contents, began
from chaoskit.nightly.outcome import night_sentence
from chaoskit.sla.judge import Judged, State
from chaoskit.sla.language import parse

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


class Budget(msgspec.Struct, frozen=True, kw_only=True):
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
    regressions: list[NumberFinding]
    troubles: list[NightUnit]
    not_run: list[str]
    budgets: list[Budget]
    expiring: list[AcceptedRecord]
    better: list[NumberFinding]
    changed: list[str]
    lines: list[str]
    curves: list[Curve]
    store: str


def build_report(contents: Contents, store: str, night: str = "") -> NightReport:
    """The report on a night: the latest, or that whose name, day or commit begins so.

    Raises:
        BadInput: if there is no such night, or more than one.
    """
    record = choose_night(contents.nights, night)
    earlier = [
        one for one in contents.nights if one.name == record.name and one.started_unix_ns < record.started_unix_ns
    ]
    findings = with_accepted_findings(record.findings, contents.accepted, _day(record))
    record = msgspec.structs.replace(record, findings=findings)
    judged = [msgspec.convert(one, Judged) for one in record.slas]
    return NightReport(
        night=record,
        before=earlier[-1] if earlier else None,
        sentence=night_sentence(record),
        broken=[_broken(one, [*earlier, record], store) for one in judged if one.state is State.BROKEN],
        regressions=[one for one in record.findings if one.change is NumberChange.REGRESSED],
        troubles=[unit for unit in record.units if unit.troubles and not unit.why_not],
        not_run=[*record.missing, *_gone(record, earlier)],
        budgets=[budget for one in judged if (budget := _budget(one)) is not None],
        expiring=[one for one in contents.accepted if _day(record) <= one.until <= _day(record) + _SOON],
        better=[one for one in record.findings if one.change is NumberChange.BETTER],
        changed=_changed(record, earlier),
        lines=record.lines,
        curves=_curves(contents, record),
        store=store,
    )


def choose_night(nights: Sequence[NightRecord], name: str) -> NightRecord:
    """The latest night, or the one that is named. Raises BadInput."""
    if not nights:
        raise BadInput("night", name, "there is none in this history: chaoskit nightly run makes one")
    if not name:
        return nights[-1]
    found = [one for one in nights if name in (str(_day(one)), one.name) or one.night.startswith(name)]
    found = found or [one for one in nights if one.commit.startswith(name)]
    if not found:
        known = ", ".join(f"{_day(one)} ({one.night[:13]})" for one in nights[-5:])
        raise BadInput("night", name, f"name one by its day, its commit or its beginning: {known}")
    return found[-1]


def _day(night: NightRecord) -> date:
    return datetime.fromtimestamp(night.started_unix_ns / 1e9, UTC).date()


def _broken(judged: Judged, nights: Sequence[NightRecord], store: str) -> BrokenLine:
    last_good, first_bad = "", nights[-1].commit
    for night in reversed(nights):
        states = [one["state"] for one in night.slas if (one["sla"], one["line"]) == (judged.sla, judged.line)]
        if states and State.BROKEN not in states:
            last_good = night.commit
            break
        first_bad = night.commit if states else first_bad
    replay = [f"chaoskit replay --history {store} {run}" for run in judged.missed[-1:]]
    return BrokenLine(judged=judged, since=(last_good, first_bad), replay=replay)


def _gone(record: NightRecord, earlier: Sequence[NightRecord]) -> list[str]:
    """Tests of the night before that are no part of this one, in any way."""
    if not earlier:
        return []
    told = " ".join(record.missing)
    now = {(unit.part, unit.test) for unit in record.units}
    return [
        f"{unit.part}: {unit.test}: it ran in the night before, and is not there any more"
        for unit in earlier[-1].units
        if (unit.part, unit.test) not in now and unit.test not in told
    ]


def _budget(judged: Judged) -> Budget | None:
    try:
        condition = parse(judged.line, "line")
    except BadInput:  # a line about a regression
        return None
    if not condition.is_objective or not judged.runs:
        return None
    allowed = (1 - condition.share) * judged.runs
    return Budget(sla=judged.sla, line=judged.line, runs=judged.runs, allowed=allowed, misses=judged.misses)


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


def _curves(contents: Contents, record: NightRecord) -> list[Curve]:
    """Of the series that ran in this night, up to it."""
    until = _day(record)
    tests = {unit.test for unit in record.units if unit.part == "experiments" and unit.runs}
    found = []
    for (series, _), runs in by_series(contents.runs).items():
        mine = [run for run in runs if began(run.session).date() <= until]
        if not mine or mine[-1].title.partition(" #")[0] not in tests:
            continue
        points = _points(mine)[-NIGHTS_SHOWN:]
        tonight = [run for run in mine if began(run.session).date() == until and run.claimed]
        recovered = sum(run.verdict == "passed" for run in tonight)
        found.append(Curve(series=series, title=mine[-1].title, points=points, recovered=recovered, runs=len(tonight)))
    return found


def _points(runs: Sequence[RunRecord]) -> list[NightPoint]:
    by_day: dict[date, list[float]] = {}
    for run in runs:
        if RECOVERY in run.metrics and run.verdict == "passed":
            by_day.setdefault(began(run.session).date(), []).append(run.metrics[RECOVERY].value)
    return [
        NightPoint(day=day, middle=median(values), low=min(values), high=max(values), runs=len(values))
        for day, values in sorted(by_day.items())
    ]
