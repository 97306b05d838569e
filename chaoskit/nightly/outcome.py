"""What a night has shown, as an exit status and a sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chaoskit.history.finding import NumberChange
from chaoskit.history.record import NightRecord, NightUnit, RunRecord
from chaoskit.report.summary import plural
from chaoskit.sla.judge import State
from chaoskit.vocabulary import Verdict

#: How a line begins about something that a night has not put back.
LEFT_BEHIND = "left behind"
#: What cannot have run: it is shown, and a night without it is good.
NO_CONTROL = "control: none is named, so nothing tells a machine that is not fit"
NO_GOOD_NIGHT = "comparison: there is no good night yet to compare with"


def verdicts_of(runs: Iterable[RunRecord]) -> dict[Verdict, int]:
    """How many runs have each verdict: of those that their test does not judge by itself."""
    return dict(Counter(run.verdict for run in runs if run.claimed))


def exit_code_of(night: NightRecord) -> int:
    """1: something is worse than it may be. 10: something left no evidence. 11: it did not run to its end."""
    if night.reason or any(line.startswith(LEFT_BEHIND) for line in night.lines):
        return Verdict.ERROR.exit_code
    verdicts = Counter[Verdict]()
    for unit in night.units:
        verdicts.update(unit.verdicts)
    is_broken = any(one["state"] == State.BROKEN for one in night.slas)
    is_worse = any(one.is_failure for one in night.findings)
    if verdicts[Verdict.FAILED] or is_broken or is_worse or any(map(_has_failed, night.units)):
        return Verdict.FAILED.exit_code
    if verdicts[Verdict.ERROR]:
        return Verdict.ERROR.exit_code
    is_unknown = verdicts[Verdict.UNKNOWN] or any(one["state"] == State.UNKNOWN for one in night.slas)
    return Verdict.UNKNOWN.exit_code if is_unknown or did_not_run(night) else 0


def did_not_run(night: NightRecord) -> list[str]:
    """What was planned and is not there: a night that measured a part is not green."""
    return [line for line in night.missing if line not in (NO_CONTROL, NO_GOOD_NIGHT)]


def _has_failed(unit: NightUnit) -> bool:
    """A test whose own assertion failed, of runs that passed."""
    return bool(unit.troubles) and not unit.why_not and set(unit.verdicts) <= {Verdict.PASSED}


def night_sentence(night: NightRecord) -> str:
    """``2 SLAs broken, 1 regression, 3 not shown, 41 met; 388 of 392 runs passed``."""
    states = Counter(one["state"] for one in night.slas)
    worse = sum(one.is_failure for one in night.findings)
    open_ones = sum(one.change.is_open for one in night.findings)
    better = sum(one.change is NumberChange.BETTER for one in night.findings)
    told = [
        f"it ended early: {night.reason}" if night.reason else "",
        f"{states[State.BROKEN]} of {len(night.slas)} SLA lines broken" if states[State.BROKEN] else "",
        plural(worse, "regression") if worse else "",
        *(f"{states[state]} {state.value}" for state in (State.UNKNOWN, State.NOT_SHOWN, State.MET) if states[state]),
        f"{open_ones} not decided" if open_ones else "",
        f"{better} better" if better else "",
        f"{len(did_not_run(night))} did not run" if did_not_run(night) else "",
    ]
    runs = sum(unit.runs for unit in night.units)
    passed = sum(unit.verdicts.get(Verdict.PASSED, 0) for unit in night.units)
    return f"{', '.join(filter(None, told)) or 'nothing is wrong'}; {passed} of {plural(runs, 'run')} passed"


def unit_text(unit: NightUnit) -> str:
    """``test_kill: 5 passed in 7 s``."""
    if unit.why_not:
        return f"{unit.test}: did not run: {unit.why_not}"
    told = ", ".join(f"{count} {verdict}" for verdict, count in unit.verdicts.items())
    return f"{unit.test}: {told} in {unit.seconds:.0f} s{f': {unit.troubles[0]}' if unit.troubles else ''}"
