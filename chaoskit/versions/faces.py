"""A comparison of versions for people, while it goes on and afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from chaoskit.history.compare import RunComparison
from chaoskit.history.faces import ratio_text
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.plaintext import plural, printable
from chaoskit.report.summary import long_duration
from chaoskit.versions.looks import LOOKS
from chaoskit.versions.run import VersionProgress
from chaoskit.versions.schedule import ArmReport, ArmTurn, Price

_MINUTE_S = 60.0


class ProgressLines(VersionProgress):
    """Tells it in lines: a line for each look, and one for what it will cost."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def began(self, tests: int, session: int) -> None:
        again = (
            "; what looks worse is run again, and the other version goes first"
            if session > 1
            else ""
        )
        fewest, most = (2 * LOOKS[place].runs for place in (0, -1))
        self._tell(
            f"{plural(tests, 'test')} of both versions in turns, {fewest} to {most} runs each{again}"
        )

    def priced(self, price: Price) -> None:
        self._tell(price_sentence(price))

    def fell_short(self, budget_s: float, needed_s: float, tests: int) -> None:
        self._tell(short_sentence(budget_s, needed_s, tests))

    def looked(self, test: str, runs: int, findings: Sequence[NumberFinding]) -> None:
        shown = [
            one
            for one in findings
            if one.ratio is not None or one.change is not NumberChange.UNCHANGED
        ]
        self._tell(
            f"{test}, {plural(runs, 'run')} a side: {', '.join(map(finding_text, shown)) or 'unchanged'}"
        )

    def ran(self, turn: ArmTurn, report: ArmReport) -> None:
        if turn.number == 0 and report.trouble:
            self._tell(f"{turn.test}, {turn.side}: {report.trouble}")


def price_sentence(price: Price) -> str:
    """``about 75 s to 4 minutes: 3 tests, 14 to 56 runs each``."""
    fewest, most = (2 * LOOKS[place].runs for place in (0, -1))
    return f"about {_span(price.least_s, price.most_s)}: {plural(price.tests, 'test')}, {fewest} to {most} runs each"


def short_sentence(budget_s: float, needed_s: float, tests: int) -> str:
    """``a budget of 30 s cannot do: a first look at 2 tests takes 3m; give that, or name fewer tests``."""
    if not needed_s:
        return (
            f"a budget of {budget_s:g} s cannot do: it is over before the first runs are; give more"
        )
    minutes = math.ceil(needed_s / _MINUTE_S)
    return (
        f"a budget of {budget_s:g} s cannot do: a first look at {plural(tests, 'test')} takes about {minutes}m; "
        f"give --budget {minutes}m, or name fewer tests"
    )


def _span(least_s: float, most_s: float) -> str:
    least, most = long_duration(least_s), long_duration(most_s)
    if least == most:
        return most
    amount, unit, *more = least.split()
    has_one_unit = not more and most.split()[1:] == [unit]
    return f"{amount if has_one_unit else least} to {most}"


def finding_text(finding: NumberFinding) -> str:
    """``recovery 1.24 (1.11 .. 1.38) regressed``."""
    shown = (
        ratio_text(finding)
        if finding.change is not NumberChange.INCOMPARABLE
        else printable(finding.reason)
    )
    return " ".join(filter(None, [finding.metric, shown, finding.change]))


def result_sentence(comparison: RunComparison, seconds: float) -> str:
    """How long it took, and which phases grew."""
    grown = {one.phase for one in comparison.findings if one.phase}
    named = f"; longer: {', '.join(sorted(grown))}" if grown else ""
    return f"{long_duration(seconds)}{named}"
