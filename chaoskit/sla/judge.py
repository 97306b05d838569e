"""Judge what was promised by records of runs. Pure: it is given the records and the day."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from enum import StrEnum

import msgspec

from chaoskit.errors import BadInput
from chaoskit.history.compare import compare_number, is_conclusive
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.record import RunRecord, SeriesRecord
from chaoskit.history.store import began
from chaoskit.sla.exact import shows_at_least, shows_less
from chaoskit.sla.language import Condition
from chaoskit.sla.promises import NIGHTS_LEAST, Sla
from chaoskit.vocabulary import Verdict

_MISSES_TOLD = 5
_UNKNOWN_MOST = 0.1  # of the runs in a window: with more, those that are known prove nothing


class State(StrEnum):
    """What records say of one line."""

    BROKEN = "broken"
    UNKNOWN = "unknown"  # every run that it is about left no evidence, or the harness broke
    NOT_SHOWN = "not shown"
    MET = "met"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one SLA.

    Attributes:
        runs, misses: in the window, as far as they have the number. nights: of these runs.
        lacking: runs in the window that say something, but do not have the number. unknown: those that say nothing.
        reason: why it is in this state.
        missed: names of the latest runs that missed it.
    """

    sla: str
    line: str
    state: State
    runs: int = 0
    misses: int = 0
    nights: int = 0
    lacking: int = 0
    unknown: int = 0
    reason: str = ""
    missed: list[str] = []


def judge(
    sla: Sla,
    runs: Sequence[RunRecord],
    plans: Mapping[str, SeriesRecord],
    *,
    today: date,
    before: Sequence[RunRecord] = (),
) -> list[Judged]:
    """Judge each line of an SLA.

    Args:
        runs: in the order in which they were started; of each series those of its newest definition count.
        today: the end of a window of nights: what was long ago shows nothing now.
        before: runs beside which a regression is looked for.

    Raises:
        BadInput: if it is about none of these runs.
    """
    selected = [run for run in runs if sla.where.selects(run, plans.get(run.series))]
    claimed = _newest_definitions([run for run in selected if run.claimed])
    if not claimed:
        more = f"; {len(selected)} are judged by their tests themselves" if selected else ""
        raise BadInput(
            "where", sla.name, f"select runs: none of those that are recorded is meant{more}"
        )
    window = _runs_in_window(sla, claimed, today)
    if not window:
        reason = f"no run in {sla.window}; the latest one was on {night_of(claimed[-1])}"
        return [
            Judged(sla=sla.name, line=line, state=State.NOT_SHOWN, reason=reason)
            for line in _lines(sla)
        ]
    shown = [run for run in window if is_conclusive(run)]
    if not shown:
        counts = Counter(run.verdict.value for run in window)
        reason = (
            f"of all runs: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
        )
        unknown = len(window)
        lines = _lines(sla)
        return [
            Judged(sla=sla.name, line=line, state=State.UNKNOWN, unknown=unknown, reason=reason)
            for line in lines
        ]
    unknown = len(window) - len(shown)
    found = [_always(sla, one, shown, unknown) for one in sla.always]
    found += [_objective(sla, one, shown, unknown) for one in sla.objectives]
    return found + [
        _regression(sla, name, by, shown, before) for name, by in sla.regression.items()
    ]


def _lines(sla: Sla) -> list[str]:
    regressions = [_regression_line(name, by) for name, by in sla.regression.items()]
    return [one.text for one in (*sla.always, *sla.objectives)] + regressions


def _newest_definitions(runs: Sequence[RunRecord]) -> list[RunRecord]:
    newest: dict[str, int] = {}
    for run in runs:
        newest[run.series] = max(run.definition, newest.get(run.series, 1))
    return [run for run in runs if run.definition == newest[run.series]]


def _runs_in_window(sla: Sla, runs: Sequence[RunRecord], today: date) -> Sequence[RunRecord]:
    if sla.window.unit == "run":
        return runs[-sla.window.count :]
    first = today.toordinal() - sla.window.count
    return [run for run in runs if night_of(run).toordinal() > first]


def night_of(run: RunRecord) -> date:
    """The day of UTC on which its session began."""
    return began(run.session).date()


def _count(sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int) -> Judged:
    """What the runs show that have the number; not shown so far."""
    held = [(run, holds) for run in runs if (holds := condition.holds(run)) is not None]
    missed = [run for run, holds in held if not holds]
    return Judged(
        sla=sla.name,
        line=condition.text,
        state=State.NOT_SHOWN,
        runs=len(held),
        misses=len(missed),
        nights=len({night_of(run) for run, _ in held}),
        lacking=len(runs) - len(held),
        unknown=unknown,
        missed=[run.run_id for run in missed[-_MISSES_TOLD:]],
    )


def _with_state(judged: Judged, state: State, reason: str = "") -> Judged:
    return msgspec.structs.replace(judged, state=state, reason=reason)


def _met(condition: Condition, judged: Judged) -> Judged:
    """Return *met*; *not shown* if runs lack the number or too many are unknown, as these may have missed it."""
    if judged.lacking:
        number = f"{condition.number}{f' or {condition.divisor}' if condition.divisor else ''}"
        return _with_state(
            judged,
            State.NOT_SHOWN,
            f"{judged.lacking} of {judged.lacking + judged.runs} runs have no {number}",
        )
    if judged.unknown > _UNKNOWN_MOST * (judged.unknown + judged.runs):
        return _with_state(
            judged,
            State.NOT_SHOWN,
            f"{judged.unknown} of {judged.unknown + judged.runs} runs are unknown",
        )
    return _with_state(judged, State.MET)


def _always(sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int) -> Judged:
    judged = _count(sla, condition, runs, unknown)
    if judged.misses:
        return _with_state(judged, State.BROKEN, f"{judged.misses} of {judged.runs} runs missed it")
    if not judged.runs:
        return _with_state(judged, State.NOT_SHOWN, f"no run has {condition.number}")
    if judged.runs < sla.at_least:
        return _with_state(
            judged, State.NOT_SHOWN, f"{sla.at_least} runs needed, {judged.runs} so far"
        )
    return _met(condition, judged)


def _objective(sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int) -> Judged:
    judged = _count(sla, condition, runs, unknown)
    if not judged.runs:
        return _with_state(judged, State.NOT_SHOWN, f"no run has {condition.number}")
    hits = judged.runs - judged.misses
    needed = sla.needs(condition, judged.misses)
    is_less = (
        shows_less(condition.share, hits, judged.runs, sla.confidence)
        and judged.runs >= sla.at_least
    )
    is_shown = judged.runs >= needed and shows_at_least(
        condition.share, hits, judged.runs, sla.confidence
    )
    if not (is_less or is_shown):
        is_full = (
            sla.window.unit == "run" and judged.runs + judged.lacking + unknown >= sla.window.count
        )
        more = "and the window is full" if is_full else f"{judged.runs} so far"
        return _with_state(
            judged, State.NOT_SHOWN, f"{needed} runs needed with {judged.misses} misses, {more}"
        )
    if (
        judged.nights < NIGHTS_LEAST
    ):  # runs of one night have that night in common, whatever they show
        return _with_state(
            judged, State.NOT_SHOWN, f"{NIGHTS_LEAST} nights needed, {judged.nights} so far"
        )
    if is_less:
        within = f"{hits / judged.runs:.1%} of {judged.runs} runs are within it, {100 * condition.share:g} % are promised"
        return _with_state(judged, State.BROKEN, within)
    return _met(condition, judged)


def _regression_line(name: str, tolerance: float) -> str:
    return f"regression of {name} within {100 * tolerance:g} %"


def _regression(
    sla: Sla, name: str, tolerance: float, runs: Sequence[RunRecord], before: Sequence[RunRecord]
) -> Judged:
    names = {run.run_id for run in runs}
    earlier = [run for run in before if run.run_id not in names]
    judged = Judged(
        sla=sla.name, line=_regression_line(name, tolerance), state=State.NOT_SHOWN, runs=len(runs)
    )
    if not earlier:
        return _with_state(
            judged, State.NOT_SHOWN, "no reference: name earlier runs with --against"
        )
    found = compare_number(earlier, runs, name, tolerance)
    if any(one.change is NumberChange.REGRESSED for one in found):
        return _with_state(judged, State.BROKEN, _changes(found, NumberChange.REGRESSED))
    if len(runs) < sla.at_least:
        return _with_state(
            judged, State.NOT_SHOWN, f"{sla.at_least} runs needed, {len(runs)} so far"
        )
    if not found:
        return _with_state(judged, State.NOT_SHOWN, f"no run has {name}")
    is_open = any(one.change.is_open for one in found)
    return (
        _with_state(judged, State.NOT_SHOWN, _changes(found))
        if is_open
        else _with_state(judged, State.MET)
    )


def _changes(findings: Iterable[NumberFinding], only: NumberChange | None = None) -> str:
    shown = [
        one
        for one in findings
        if only in (None, one.change) and one.change is not NumberChange.UNCHANGED
    ]
    return "; ".join(
        f"{one.title}: {one.change.value}{f', {one.reason}' if one.reason else ''}" for one in shown
    )


def exit_code(judged: Iterable[Judged], *, is_strict: bool) -> int:
    """0: met, or not shown yet. 1: something is broken. 10: unknown; with ``is_strict``, not shown, too."""
    states = {one.state for one in judged}
    if State.BROKEN in states:
        return Verdict.FAILED.exit_code
    is_open = State.UNKNOWN in states or (is_strict and State.NOT_SHOWN in states)
    return Verdict.UNKNOWN.exit_code if is_open else 0
