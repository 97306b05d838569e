"""Whether records of runs show what was promised. Pure: it is told the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from chaoskit.errors import BadInput
from chaoskit.history import record
from chaoskit.history.compare import Change, compare_number
from chaoskit.history.record import RunRecord, SeriesRecord
from chaoskit.history.store import began
from chaoskit.sla.exact import shows_at_least, shows_less
from chaoskit.sla.language import Condition
from chaoskit.sla.promises import NIGHTS_LEAST, Sla
from chaoskit.vocabulary import Verdict

_MISSES_TOLD = 5


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
        reason: what is lacking, or what was missed.
        missed: names of the latest runs that missed it.
    """

    sla: str
    line: str
    state: State
    runs: int = 0
    misses: int = 0
    nights: int = 0
    reason: str = ""
    missed: list[str] = []


def judge(
    sla: Sla, runs: Sequence[RunRecord], plans: Mapping[str, SeriesRecord], before: Sequence[RunRecord] | None = None
) -> list[Judged]:
    """Judge each line of an SLA.

    Args:
        runs: in the order in which they were started. before: those that a regression is looked for beside.

    Raises:
        BadInput: if it is about none of these runs.
    """
    meant = [run for run in runs if run.claimed and sla.where.selects(run, plans.get(run.series))]
    if not meant:
        raise BadInput("where", sla.name, "select runs: none of those that are recorded is meant")
    window = _window(sla, meant)
    said = [run for run in window if record.RECOVERED in run.metrics]
    if not said:
        counts = Counter(run.verdict.value for run in window)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        lines = [one.text for one in (*sla.always, *sla.objectives)] + [
            f"regression of {name}" for name in sla.regression
        ]
        return [Judged(sla=sla.name, line=line, state=State.UNKNOWN, reason=f"of all runs: {told}") for line in lines]
    found = [_always(sla, one, said) for one in sla.always]
    found += [_objective(sla, one, said) for one in sla.objectives]
    return found + [_regression(sla, name, tolerance, said, before) for name, tolerance in sla.regression.items()]


def _window(sla: Sla, runs: Sequence[RunRecord]) -> Sequence[RunRecord]:
    if sla.window.unit == "run":
        return runs[-sla.window.count :]
    nights = sorted({night_of(run) for run in runs})[-sla.window.count :]
    return [run for run in runs if night_of(run) in nights]


def night_of(run: RunRecord) -> str:
    """The day of UTC on which its session began."""
    return f"{began(run.session):%Y-%m-%d}"


def _count(sla: Sla, condition: Condition, runs: Iterable[RunRecord]) -> tuple[list[RunRecord], Judged]:
    """The runs that have the number, and what they show so far."""
    held = [(run, holds) for run in runs if (holds := condition.holds(run)) is not None]
    missed = [run for run, holds in held if not holds]
    nights = len({night_of(run) for run, _ in held})
    told = Judged(
        sla=sla.name,
        line=condition.text,
        state=State.NOT_SHOWN,
        runs=len(held),
        misses=len(missed),
        nights=nights,
        reason="" if held else f"no run has {condition.number}{f' and {condition.below}' if condition.below else ''}",
        missed=[run.run_id for run in missed[-_MISSES_TOLD:]],
    )
    return [run for run, _ in held], told


def _always(sla: Sla, condition: Condition, runs: Sequence[RunRecord]) -> Judged:
    _, told = _count(sla, condition, runs)
    if told.misses:
        return msgspec.structs.replace(told, state=State.BROKEN, reason=f"{told.misses} of {told.runs} runs missed it")
    if told.runs and told.runs < sla.at_least:
        return msgspec.structs.replace(told, reason=f"{sla.at_least} runs needed, {told.runs} so far")
    return msgspec.structs.replace(told, state=State.MET) if told.runs else told


def _objective(sla: Sla, condition: Condition, runs: Sequence[RunRecord]) -> Judged:
    _, told = _count(sla, condition, runs)
    if not told.runs:
        return told
    hits, share = told.runs - told.misses, f"{hits_share(told):.1%} of {told.runs} runs are within it"
    if shows_less(condition.share, hits, told.runs, sla.confidence):
        return msgspec.structs.replace(told, state=State.BROKEN, reason=f"{share}, {condition.share:.0%} are promised")
    needed = sla.needs(condition, told.misses)
    if told.runs < needed or not shows_at_least(condition.share, hits, told.runs, sla.confidence):
        return msgspec.structs.replace(
            told, reason=f"{needed} runs needed with {told.misses} misses, {told.runs} so far"
        )
    if sla.window.unit == "night" and told.nights < NIGHTS_LEAST:
        return msgspec.structs.replace(told, reason=f"{NIGHTS_LEAST} nights needed, {told.nights} so far")
    return msgspec.structs.replace(told, state=State.MET)


def hits_share(judged: Judged) -> float:
    """The share of its runs that are within a line."""
    return 1 - judged.misses / judged.runs if judged.runs else 0.0


def _regression(
    sla: Sla, name: str, tolerance: float, runs: Sequence[RunRecord], before: Sequence[RunRecord] | None
) -> Judged:
    told = Judged(
        sla=sla.name, line=f"regression of {name} within {tolerance:.0%}", state=State.NOT_SHOWN, runs=len(runs)
    )
    if not before:
        return msgspec.structs.replace(told, reason="no reference: name earlier runs with --against")
    found = compare_number(before, runs, name, tolerance)
    reasons = "; ".join(f"{one.title}: {one.change.value}" + (f", {one.reason}" if one.reason else "") for one in found)
    if any(one.change is Change.REGRESSED for one in found):
        return msgspec.structs.replace(told, state=State.BROKEN, reason=reasons)
    is_shown = bool(found) and not any(one.change.is_open for one in found)
    return msgspec.structs.replace(
        told, state=State.MET if is_shown else State.NOT_SHOWN, reason="" if is_shown else reasons
    )


def exit_code(judged: Iterable[Judged], *, is_strict: bool) -> int:
    """0: met, or not shown yet. 1: something is broken. 10: unknown; with ``is_strict``, not shown, too."""
    states = {one.state for one in judged}
    if State.BROKEN in states:
        return Verdict.FAILED.exit_code
    is_open = State.UNKNOWN in states or (is_strict and State.NOT_SHOWN in states)
    return Verdict.UNKNOWN.exit_code if is_open else 0
