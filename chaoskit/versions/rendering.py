"""Rendering of a comparison of versions, during its runs and afterwards.

-> history/rendering.py: tables and Markdown of the findings. cli/testing/compare.py prints both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chaoskit.history.compare import RunComparison
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.history.rendering import ratio_text
from chaoskit.plaintext import plural, printable
from chaoskit.report.summary import long_duration
from chaoskit.versions.looks import LOOKS
from chaoskit.versions.run import VersionProgress
from chaoskit.versions.schedule import ArmReport, ArmTurn, ExpectedDuration

_MINUTE_S = 60.0


class ProgressLines(VersionProgress):
    """Progress as lines of text, such as one for each look at a test.

    Others have the number of tests, the expected duration, a budget that is too short, and
    warm-ups that failed or were skipped.

    Args:
        write_line: receives each line.
    """

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line

    def began(self, tests: int, session: int) -> None:
        confirmation = (
            "; regressions are run again, and the other version goes first" if session > 1 else ""
        )
        fewest, most = (2 * LOOKS[index].runs for index in (0, -1))
        self._write_line(
            f"{plural(tests, 'test')} of both versions in turns, "
            f"{fewest} to {most} runs each{confirmation}"
        )

    def estimated(self, expected: ExpectedDuration) -> None:
        self._write_line(duration_sentence(expected))

    def fell_short(self, budget_s: float, needed_s: float, tests: int) -> None:
        self._write_line(short_sentence(budget_s, needed_s, tests))

    def looked(self, test: str, runs: int, findings: Sequence[NumberFinding]) -> None:
        shown_findings = [
            finding
            for finding in findings
            if finding.ratio is not None or finding.change is not NumberChange.UNCHANGED
        ]
        texts = ", ".join(map(finding_text, shown_findings)) or "unchanged"
        self._write_line(f"{test}, {plural(runs, 'run')} a side: {texts}")

    def ran(self, turn: ArmTurn, report: ArmReport) -> None:
        if turn.number == 0 and report.trouble:
            self._write_line(f"{turn.test}, {turn.side}: {report.trouble}")


def duration_sentence(expected: ExpectedDuration) -> str:
    """Return a sentence such as ``about 75 s to 4 minutes: 3 tests, 14 to 56 runs each``."""
    fewest, most = (2 * LOOKS[index].runs for index in (0, -1))
    return (
        f"about {_span(expected.least_s, expected.most_s)}: {plural(expected.tests, 'test')}, "
        f"{fewest} to {most} runs each"
    )


def short_sentence(budget_s: float, needed_s: float, tests: int) -> str:
    """Return a sentence about a budget that is too short.

    An example: ``a budget of 30 s is too short: a first look at 2 tests takes about 3m; give
    --budget 3m, or name fewer tests``.
    """
    if not needed_s:
        return f"a budget of {budget_s:g} s is too short: it ended before the first runs; give more"
    minutes = math.ceil(needed_s / _MINUTE_S)
    return (
        f"a budget of {budget_s:g} s is too short: a first look at {plural(tests, 'test')} takes "
        f"about {minutes}m; give --budget {minutes}m, or name fewer tests"
    )


def _span(least_s: float, most_s: float) -> str:
    """Return two durations as a range, with their unit once if it is the same."""
    least, most = long_duration(least_s), long_duration(most_s)
    if least == most:
        return most
    amount, unit, *more = least.split()
    has_one_unit = not more and most.split()[1:] == [unit]
    return f"{amount if has_one_unit else least} to {most}"


def finding_text(finding: NumberFinding) -> str:
    """Return a text such as ``recovery 1.24 (1.11 .. 1.38) regressed``."""
    shown = (
        ratio_text(finding)
        if finding.change is not NumberChange.INCOMPARABLE
        else printable(finding.reason)
    )
    return " ".join(filter(None, [finding.metric, shown, finding.change]))


def result_sentence(comparison: RunComparison, seconds: float) -> str:
    """Return a text with the duration of a comparison and the phases that grew.

    An example: ``47 s; longer: restored``.
    """
    grown = {finding.phase for finding in comparison.findings if finding.phase}
    named = f"; longer: {', '.join(sorted(grown))}" if grown else ""
    return f"{long_duration(seconds)}{named}"
