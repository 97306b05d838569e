"""Properties of a test of the canary, for the table of ``chaoskit canary``."""

from __future__ import annotations

from collections.abc import Callable

from chaoskit import Outcome, Verdict

Record = Callable[[str, object], None]

#: Kinds of trials: a mistake that must not pass; one that is known to pass; a change that must
#: pass.
MISTAKE, LIMIT, HARMLESS = "mistake", "limit", "harmless"

#: Prefix of the properties of a test in JUnit XML, which ``chaoskit canary`` reads.
_PREFIX = "canary."


def record_trial(
    record: Record,
    title: str,
    cell: str,
    outcome: Outcome,
    found_by: str = "",
    *,
    kind: str = MISTAKE,
) -> None:
    """Record a trial in the report of its test: its cell, the check that found it, and the verdict.

    Args:
        record: pytest's ``record_property``.
        title: name of the mistake or change.
        cell: cell of the matrix.
        outcome: outcome of the run.
        found_by: the check that should lead to the verdict; the first one that did is recorded if
            it did not, or for "". For a limit, the reason why no check finds it.
        kind: kind of the trial.
    """
    leading = [
        check.name for check in outcome.checks if check.verdict == outcome.verdict != Verdict.PASSED
    ]
    check = found_by if found_by in leading or kind == LIMIT else ", ".join(leading[:1])
    properties = {
        "what": title,
        "cell": cell,
        "check": check,
        "verdict": outcome.verdict.value,
        "kind": kind,
    }
    for name, text in properties.items():
        record(_PREFIX + name, text)
