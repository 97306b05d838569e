"""Evaluation of SLAs on records of runs. This module is pure: records and date are arguments.

-> sla/language.py: whether one run is within a limit. sla/exact.py: the bounds on a share of runs.
-> history/compare.py: regressions. nightly/outcome.py: the exit code of a night.
-> cli/testing/sla.py exits by the result; nightly/run.py puts it into the record of the night.
"""

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

_MISSES_LISTED = 5
_UNKNOWN_MOST = (
    0.1  # the share of unknown runs in a window beyond which the other runs prove nothing
)


class State(StrEnum):
    """The state of one line of an SLA, the worst first."""

    BROKEN = "broken"
    UNKNOWN = "unknown"  # no run in the window left evidence, or the harness broke in all of them
    NOT_SHOWN = "not shown"  # the runs prove neither; the reason has what is missing
    MET = "met"


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of one line of an SLA.

    The counts ``misses``, ``nights`` and ``lacking`` of a regression are 0. ``unknown`` is 0, too,
    unless no run in the window is conclusive.

    Attributes:
        line: the text of the line.
        runs: the number of runs in the window that have the number; for a regression, of all
            conclusive runs.
        misses: the number of these runs that are beyond the limit.
        nights: the number of nights on which these runs were made.
        lacking: the number of conclusive runs in the window that do not have the number.
        unknown: the number of inconclusive runs in the window.
        reason: why the line is in this state; "" if it is met.
        missed: the ids of the latest runs that missed it, five at most.
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
    """Return the evaluation of each line of an SLA.

    All lines are *not shown* if no selected run is in the window. All are *unknown* if the window
    has no conclusive run.

    Args:
        runs: the runs, sorted by their start. Only the newest definition of each series counts.
        plans: the plan of each series, by which runs are selected.
        today: the last day of a window of nights.
        before: the reference runs for regressions; without them, regressions are *not shown*.

    Raises:
        BadInput: if the SLA selects none of these runs, or only runs that their tests judge.
    """
    selected = [run for run in runs if sla.where.selects(run, plans.get(run.series))]
    eligible = _newest_definitions([run for run in selected if run.claimed])
    if not eligible:
        exception = (
            f", except {len(selected)} that their tests judge themselves" if selected else ""
        )
        raise BadInput("where", sla.name, f"select recorded runs: none of them matches{exception}")
    window_runs = _runs_in_window(sla, eligible, today)
    if not window_runs:
        reason = f"no run in {sla.window}; the latest run was on {night_of(eligible[-1])}"
        return [
            Judged(sla=sla.name, line=line, state=State.NOT_SHOWN, reason=reason)
            for line in _line_texts(sla)
        ]
    conclusive = [run for run in window_runs if is_conclusive(run)]
    if not conclusive:
        counts = Counter(run.verdict.value for run in window_runs)
        reason = (
            f"of all runs: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"
        )
        unknown = len(window_runs)
        lines = _line_texts(sla)
        return [
            Judged(sla=sla.name, line=line, state=State.UNKNOWN, unknown=unknown, reason=reason)
            for line in lines
        ]
    unknown = len(window_runs) - len(conclusive)
    judged = [_judge_always(sla, condition, conclusive, unknown) for condition in sla.always]
    judged += [
        _judge_objective(sla, condition, conclusive, unknown) for condition in sla.objectives
    ]
    return judged + [
        _judge_regression(sla, name, tolerance, conclusive, before)
        for name, tolerance in sla.regression.items()
    ]


def _line_texts(sla: Sla) -> list[str]:
    """Return the texts of all lines of an SLA."""
    regressions = [_regression_text(name, tolerance) for name, tolerance in sla.regression.items()]
    return [condition.text for condition in (*sla.always, *sla.objectives)] + regressions


def _newest_definitions(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs that have the newest definition of their series."""
    newest: dict[str, int] = {}
    for run in runs:
        newest[run.series] = max(run.definition, newest.get(run.series, 1))
    return [run for run in runs if run.definition == newest[run.series]]


def _runs_in_window(sla: Sla, runs: Sequence[RunRecord], today: date) -> Sequence[RunRecord]:
    """Return the latest runs, or the runs of the latest nights."""
    if sla.window.unit == "run":
        return runs[-sla.window.count :]
    first = today.toordinal() - sla.window.count
    return [run for run in runs if night_of(run).toordinal() > first]


def night_of(run: RunRecord) -> date:
    """Return the UTC day on which the session of a run began."""
    return began(run.session).date()


def _count(sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int) -> Judged:
    """Return an evaluation with the counts of runs that have a number, and that miss its limit.

    Its state is still *not shown*.
    """
    measured = [(run, holds) for run in runs if (holds := condition.holds(run)) is not None]
    missed = [run for run, holds in measured if not holds]
    return Judged(
        sla=sla.name,
        line=condition.text,
        state=State.NOT_SHOWN,
        runs=len(measured),
        misses=len(missed),
        nights=len({night_of(run) for run, _ in measured}),
        lacking=len(runs) - len(measured),
        unknown=unknown,
        missed=[run.run_id for run in missed[-_MISSES_LISTED:]],
    )


def _with_state(judged: Judged, state: State, reason: str = "") -> Judged:
    """Return a copy with another state and reason."""
    return msgspec.structs.replace(judged, state=state, reason=reason)


def _met_or_not_shown(condition: Condition, judged: Judged) -> Judged:
    """Return *met*, or *not shown* if runs lack the number or more than a tenth are unknown.

    These may have missed the limit.
    """
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


def _judge_always(
    sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int
) -> Judged:
    """Return the evaluation of a line that each run must meet; one miss breaks it.

    Without a miss it is *not shown* if fewer runs than ``sla.at_least`` have the number.
    """
    judged = _count(sla, condition, runs, unknown)
    if judged.misses:
        return _with_state(judged, State.BROKEN, f"{judged.misses} of {judged.runs} runs missed it")
    if not judged.runs:
        return _with_state(judged, State.NOT_SHOWN, f"no run has {condition.number}")
    if judged.runs < sla.at_least:
        return _with_state(
            judged, State.NOT_SHOWN, f"{sla.at_least} runs needed, {judged.runs} so far"
        )
    return _met_or_not_shown(condition, judged)


def _judge_objective(
    sla: Sla, condition: Condition, runs: Sequence[RunRecord], unknown: int
) -> Judged:
    """Return the evaluation of a line that a share of the runs must meet.

    It is met or broken only if the runs of enough nights prove it, with the confidence of the SLA.
    Otherwise it is *not shown*.
    """
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
        measured = f"{hits / judged.runs:.1%} of {judged.runs} runs are within the limit"
        within = f"{measured}, {100 * condition.share:g} % are promised"
        return _with_state(judged, State.BROKEN, within)
    return _met_or_not_shown(condition, judged)


def _regression_text(name: str, tolerance: float) -> str:
    """Return the text of a regression line."""
    return f"regression of {name} within {100 * tolerance:g} %"


def _judge_regression(
    sla: Sla, name: str, tolerance: float, runs: Sequence[RunRecord], before: Sequence[RunRecord]
) -> Judged:
    """Return the evaluation of a line that promises no regression of a number beyond a tolerance.

    A regression breaks it, even with few runs. It is *not shown* if there are fewer runs than
    ``sla.at_least``, no run has the number, or a finding is open.

    Args:
        tolerance: the allowed growth as a fraction, such as 0.1.
        before: the reference runs, of which those in ``runs`` are left out. The line is *not shown*
            if none remains.
    """
    names = {run.run_id for run in runs}
    earlier = [run for run in before if run.run_id not in names]
    judged = Judged(
        sla=sla.name, line=_regression_text(name, tolerance), state=State.NOT_SHOWN, runs=len(runs)
    )
    if not earlier:
        return _with_state(
            judged, State.NOT_SHOWN, "no reference: name earlier runs with --against"
        )
    findings = compare_number(earlier, runs, name, tolerance)
    if any(finding.change is NumberChange.REGRESSED for finding in findings):
        return _with_state(judged, State.BROKEN, _changes_text(findings, NumberChange.REGRESSED))
    if len(runs) < sla.at_least:
        return _with_state(
            judged, State.NOT_SHOWN, f"{sla.at_least} runs needed, {len(runs)} so far"
        )
    if not findings:
        return _with_state(judged, State.NOT_SHOWN, f"no run has {name}")
    is_open = any(finding.change.is_open for finding in findings)
    return (
        _with_state(judged, State.NOT_SHOWN, _changes_text(findings))
        if is_open
        else _with_state(judged, State.MET)
    )


def _changes_text(findings: Iterable[NumberFinding], kind: NumberChange | None = None) -> str:
    """Return a text about the findings that are not *unchanged*.

    Args:
        kind: the kind of the findings in the text; None for all kinds.
    """
    shown_findings = [
        finding
        for finding in findings
        if kind in (None, finding.change) and finding.change is not NumberChange.UNCHANGED
    ]
    return "; ".join(
        f"{finding.title}: {finding.change.value}{f', {finding.reason}' if finding.reason else ''}"
        for finding in shown_findings
    )


def exit_code(judged: Iterable[Judged], *, is_strict: bool) -> int:
    """Return the exit code of an evaluation.

    1: a line is broken. 10: no line is broken, but one is unknown or, with ``is_strict``, not
    shown. 0: all other cases.
    """
    states = {line.state for line in judged}
    if State.BROKEN in states:
        return Verdict.FAILED.exit_code
    is_open = State.UNKNOWN in states or (is_strict and State.NOT_SHOWN in states)
    return Verdict.UNKNOWN.exit_code if is_open else 0
