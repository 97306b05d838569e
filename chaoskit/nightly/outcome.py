"""Outcome of a night as an exit code and a sentence. Pure.

-> sla/judge.py: the states of SLA lines. history/compare.py: regressions, and the exit code of a
comparison. vocabulary.py: the exit code of each verdict.
-> nightly/run.py writes the exit code into the record; cli/testing/nightly.py exits with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chaoskit.history.finding import NumberChange
from chaoskit.history.record import NightRecord, NightUnit, RunRecord
from chaoskit.plaintext import plural
from chaoskit.sla.judge import State
from chaoskit.vocabulary import Verdict

#: The beginning of lines about resources that the night did not put back.
LEFT_BEHIND = "left behind"
#: Planned parts that cannot have run. They are shown, but a night without them is good.
NO_CONTROL = "control: none is named, so nothing tells a machine that is not fit"
NO_GOOD_NIGHT = "comparison: there is no good night yet to compare with"


def verdicts_of(runs: Iterable[RunRecord]) -> dict[Verdict, int]:
    """Return the number of runs of each verdict.

    Runs that their test judges itself are left out.
    """
    return dict(Counter(run.verdict for run in runs if run.claimed))


def exit_code_of(night: NightRecord) -> int:
    """Return the exit code of a night: the first of these that applies, else 0.

    11: the night ended early, the harness failed, or resources are left behind. 1: a run, a test,
    an SLA or a number is worse than it may be. 10: evidence is missing, or a planned part did not
    run. Accepted regressions, open findings and SLA lines *not shown* are no failure.
    """
    verdicts = _verdicts(night)
    if night.reason or verdicts[Verdict.ERROR] or _left_behind_lines(night):
        return Verdict.ERROR.exit_code
    is_broken = any(line["state"] == State.BROKEN for line in night.slas)
    is_worse = any(finding.is_failure for finding in night.findings)
    if (
        verdicts[Verdict.FAILED]
        or is_broken
        or is_worse
        or any(unit.failures for unit in night.units)
    ):
        return Verdict.FAILED.exit_code
    is_unknown = verdicts[Verdict.UNKNOWN] or any(
        line["state"] == State.UNKNOWN for line in night.slas
    )
    return Verdict.UNKNOWN.exit_code if is_unknown or did_not_run(night) else 0


def _verdicts(night: NightRecord) -> Counter[Verdict]:
    """Return the number of runs of each verdict, over all tests."""
    verdicts = Counter[Verdict]()
    for unit in night.units:
        verdicts.update(unit.verdicts)
    return verdicts


def has_failed(unit: NightUnit) -> bool:
    """Return True if a test failed or one of its runs did not pass, and a reason is known.

    A test that was only skipped did not fail.
    """
    return bool(unit.troubles) and (
        bool(unit.failures) or bool(unit.verdicts.keys() - {Verdict.PASSED})
    )


def _left_behind_lines(night: NightRecord) -> list[str]:
    """Return the lines about resources that are left behind."""
    return [line for line in night.lines if line.startswith(LEFT_BEHIND)]


def did_not_run(night: NightRecord) -> list[str]:
    """Return the planned parts that are missing, each with the reason. They make the night bad.

    A missing control and a missing good night to compare with are left out.
    """
    return [line for line in night.missing if line not in (NO_CONTROL, NO_GOOD_NIGHT)]


def night_sentence(night: NightRecord) -> str:
    """Return a summary of the night.

    An example: ``1 of 44 SLA lines broken, 1 regression, 3 not shown, 40 met; 388 of 392 runs
    passed``.
    """
    states, verdicts = Counter(line["state"] for line in night.slas), _verdicts(night)
    nouns = {
        ("regression", "regressions"): sum(finding.is_failure for finding in night.findings),
        ("test failed by itself", "tests failed by themselves"): sum(
            bool(unit.failures) for unit in night.units
        ),
        ("run failed", "runs failed"): verdicts[Verdict.FAILED],
        ("run unknown", "runs unknown"): verdicts[Verdict.UNKNOWN],
        ("run with a harness error", "runs with harness errors"): verdicts[Verdict.ERROR],
    }
    counted = {
        "did not run": len(did_not_run(night)),
        LEFT_BEHIND: len(_left_behind_lines(night)),
        **{state.value: states[state] for state in (State.UNKNOWN, State.NOT_SHOWN, State.MET)},
        "not decided": sum(finding.change.is_open for finding in night.findings),
        "better": sum(finding.change is NumberChange.BETTER for finding in night.findings),
    }
    parts = [
        f"the night ended early: {night.reason}" if night.reason else "",
        f"{states[State.BROKEN]} of {plural(len(night.slas), 'SLA line')} broken"
        if states[State.BROKEN]
        else "",
        *(plural(count, *forms) for forms, count in nouns.items() if count),
        *(f"{count} {label}" for label, count in counted.items() if count),
    ]
    passed = f"{verdicts[Verdict.PASSED]} of {plural(verdicts.total(), 'run')} passed"
    return f"{', '.join(filter(None, parts)) or 'nothing is wrong'}; {passed}"


def unit_text(unit: NightUnit) -> str:
    """Return a line such as ``test_kill: 5 passed in 7 s``, with the first trouble if any.

    A test that did not run in full has the reason instead.
    """
    if unit.why_not:
        return f"{unit.test}: did not run: {unit.why_not}"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in unit.verdicts.items())
    return f"{unit.test}: {verdicts} in {unit.seconds:.0f} s{f': {unit.troubles[0]}' if unit.troubles else ''}"
