"""What a test of the canary tells of its mistake, for the table of ``chaoskit canary``."""

from __future__ import annotations

from collections.abc import Callable

from chaoskit import Outcome, Verdict

Record = Callable[[str, object], None]

#: What is tried: a mistake, which must not pass; one that is known to pass; a change after which a run must pass.
MISTAKE, LIMIT, HARMLESS = "mistake", "limit", "harmless"

#: Names of the properties of a test in JUnit XML begin so; ``chaoskit canary`` reads them.
_PREFIX = "canary."


def tell(
    record: Record,
    what: str,
    cell: str,
    outcome: Outcome,
    found_by: str = "",
    *,
    kind: str = MISTAKE,
) -> None:
    """Have the report of a test name what was tried, in which cell, the check that found it, and the verdict.

    Args:
        record: pytest's ``record_property``.
        found_by: the check, or why there is none; by default the first one that led to the verdict.
    """
    led = [
        check.name for check in outcome.checks if check.verdict == outcome.verdict != Verdict.PASSED
    ]
    check = found_by if found_by in led or kind == LIMIT else ", ".join(led[:1])
    told = {
        "what": what,
        "cell": cell,
        "check": check,
        "verdict": outcome.verdict.value,
        "kind": kind,
    }
    for name, value in told.items():
        record(_PREFIX + name, value)
