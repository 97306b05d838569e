"""What a night has shown, as an exit status and a sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chaoskit.history.finding import NumberChange
from chaoskit.history.record import NightRecord, NightUnit, RunRecord
from chaoskit.plaintext import plural
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
    """1: something is worse than it may be. 10: something left no evidence, or did not run. 11: it did not run to its
    end, the harness failed, or something is left behind.
    """
    verdicts = _verdicts(night)
    if night.reason or verdicts[Verdict.ERROR] or _left(night):
        return Verdict.ERROR.exit_code
    is_broken = any(one["state"] == State.BROKEN for one in night.slas)
    is_worse = any(one.is_failure for one in night.findings)
    if (
        verdicts[Verdict.FAILED]
        or is_broken
        or is_worse
        or any(unit.failures for unit in night.units)
    ):
        return Verdict.FAILED.exit_code
    is_unknown = verdicts[Verdict.UNKNOWN] or any(
        one["state"] == State.UNKNOWN for one in night.slas
    )
    return Verdict.UNKNOWN.exit_code if is_unknown or did_not_run(night) else 0


def _verdicts(night: NightRecord) -> Counter[Verdict]:
    verdicts = Counter[Verdict]()
    for unit in night.units:
        verdicts.update(unit.verdicts)
    return verdicts


def has_failed(unit: NightUnit) -> bool:
    """Whether a test or one of its runs failed: one that was skipped once did not."""
    return bool(unit.troubles) and (
        bool(unit.failures) or bool(unit.verdicts.keys() - {Verdict.PASSED})
    )


def _left(night: NightRecord) -> list[str]:
    return [line for line in night.lines if line.startswith(LEFT_BEHIND)]


def did_not_run(night: NightRecord) -> list[str]:
    """What was planned and is not there: a night that measured a part is not green."""
    return [line for line in night.missing if line not in (NO_CONTROL, NO_GOOD_NIGHT)]


def night_sentence(night: NightRecord) -> str:
    """``1 of 44 SLA lines broken, 1 regression, 3 not shown, 40 met; 388 of 392 runs passed``."""
    states, verdicts = Counter(one["state"] for one in night.slas), _verdicts(night)
    nouns = {
        ("regression", "regressions"): sum(one.is_failure for one in night.findings),
        ("test failed by itself", "tests failed by themselves"): sum(
            bool(unit.failures) for unit in night.units
        ),
        ("run failed", "runs failed"): verdicts[Verdict.FAILED],
        ("run unknown", "runs unknown"): verdicts[Verdict.UNKNOWN],
        ("run an error of the harness", "runs errors of the harness"): verdicts[Verdict.ERROR],
    }
    counted = {
        "did not run": len(did_not_run(night)),
        LEFT_BEHIND: len(_left(night)),
        **{state.value: states[state] for state in (State.UNKNOWN, State.NOT_SHOWN, State.MET)},
        "not decided": sum(one.change.is_open for one in night.findings),
        "better": sum(one.change is NumberChange.BETTER for one in night.findings),
    }
    told = [
        f"it ended early: {night.reason}" if night.reason else "",
        f"{states[State.BROKEN]} of {plural(len(night.slas), 'SLA line')} broken"
        if states[State.BROKEN]
        else "",
        *(plural(count, *forms) for forms, count in nouns.items() if count),
        *(f"{count} {what}" for what, count in counted.items() if count),
    ]
    passed = f"{verdicts[Verdict.PASSED]} of {plural(verdicts.total(), 'run')} passed"
    return f"{', '.join(filter(None, told)) or 'nothing is wrong'}; {passed}"


def unit_text(unit: NightUnit) -> str:
    """``test_kill: 5 passed in 7 s``."""
    if unit.why_not:
        return f"{unit.test}: did not run: {unit.why_not}"
    told = ", ".join(f"{count} {verdict}" for verdict, count in unit.verdicts.items())
    return f"{unit.test}: {told} in {unit.seconds:.0f} s{f': {unit.troubles[0]}' if unit.troubles else ''}"
