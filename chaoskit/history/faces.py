"""Comparisons and histories for people: a sentence, a table for terminals, Markdown for pull requests, a sparkline."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from chaoskit.history.compare import RunComparison
from chaoskit.history.finding import NumberChange, NumberFinding
from chaoskit.plaintext import plural, printable
from chaoskit.report.summary import duration, number
from chaoskit.report.tables import Column, DataTable

_STYLES = {
    NumberChange.REGRESSED: "bold red",
    NumberChange.BETTER: "green",
    NumberChange.UNCHANGED: "dim",
    NumberChange.UNDECIDED: "yellow",
    NumberChange.INCOMPARABLE: "yellow",
    NumberChange.NO_REFERENCE: "yellow",
}
_MARKS = {NumberChange.REGRESSED: "❌", NumberChange.BETTER: "✅", NumberChange.UNCHANGED: "✅"}
_MARKUP = re.compile(r"[|<>`@\[\]\\]")
_BARS = "▁▂▃▄▅▆▇█"
_MARKDOWN_ROWS = 200


def comparison_sentence(comparison: RunComparison) -> str:
    """``1 regressed, 5 unchanged, 2 undecided; 1 series had no run``."""
    counts = comparison.changes()
    told = (
        ", ".join(f"{counts[change]} {change.value}" for change in NumberChange if counts[change])
        or "nothing was compared"
    )
    absent = f"; {len(comparison.absent)} series of before had no run" if comparison.absent else ""
    runs = sum(comparison.uncounted.values())
    uncounted = f"; {plural(runs, 'run')} counted for nothing" if runs else ""
    return f"{told}{absent}{uncounted}"


def render_comparison(comparison: RunComparison) -> DataTable:
    """Everything but what is unchanged, the worst first."""
    table = findings_table("test and number", "before", "now", "ratio")
    for one in told_first(comparison):
        what = Text.assemble(printable(f"{one.title}: {one.metric}"), *_secondary(one))
        mark = Text(one.change.value, _STYLES[one.change])
        table.add_row(
            mark, what, value_text(one, one.before), value_text(one, one.after), ratio_text(one)
        )
    return table


def findings_table(what: str, *numbers: str) -> DataTable:
    """A table for terminals: a state, what it is about, and numbers."""
    text = Column(what, is_text=True, is_heading=True)
    return DataTable(
        Column("", is_heading=True), text, *(Column(name, is_number=True) for name in numbers)
    )


def told_first(comparison: RunComparison) -> list[NumberFinding]:
    """What people must see, the worst first."""
    order = list(NumberChange)
    shown = (one for one in comparison.findings if one.change is not NumberChange.UNCHANGED)
    return sorted(shown, key=lambda one: order.index(one.change))


def _secondary(finding: NumberFinding) -> list[tuple[str, str]]:
    return [(f"\n{printable(why)}", "dim") for why in _reasons(finding)]


def _reasons(finding: NumberFinding) -> list[str]:
    return [why for why in (finding.reason, finding.accepted) if why]


def value_text(finding: NumberFinding, value: float | None) -> str:
    """A value of a finding: of what is counted, the share of runs that missed it."""
    if value is None:
        return "–"
    if finding.unit == "s":
        return duration(value)
    return f"{number(value)} x" if finding.unit == "ratio" else f"{value:.0%}"


def ratio_text(finding: NumberFinding) -> str:
    """``1.24 (1.11 .. 1.38)``; without an interval where it has no end."""
    ratio = finding.ratio
    if ratio is None:
        return ""
    interval = f" ({ratio.low:.2f} .. {ratio.high:.2f})" if ratio.high < float("inf") else ""
    return f"{ratio.ratio:.2f}{interval}"


def markdown(comparison: RunComparison, heading: str = "chaoskit") -> str:
    """For the summary of a CI job, or a comment on a pull request."""
    lines = [f"### {heading}: {comparison_sentence(comparison)}", ""]
    if rows := told_first(comparison):
        lines += ["| | test | number | before | now | ratio | |", "|---|---|---|---|---|---|---|"]
        for one in rows[:_MARKDOWN_ROWS]:
            cells = [_MARKS.get(one.change, "❔"), cell(one.title), cell(one.metric)]
            cells += [value_text(one, one.before), value_text(one, one.after), ratio_text(one)]
            lines.append(
                f"| {' | '.join(cells)} | {cell(': '.join([one.change.value, *_reasons(one)]))} |"
            )
        if len(rows) > _MARKDOWN_ROWS:
            lines.append(f"\nand {len(rows) - _MARKDOWN_ROWS} more")
    lines += [f"\nNo run of it now: {cell(title)}" for title in comparison.absent]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    """Text as a cell of a table in Markdown: no mark-up, no mention and no link of its own."""
    return _MARKUP.sub(r"\\\g<0>", printable(text).replace("\n", " "))


def sparkline(values: Sequence[float]) -> str:
    """Values as bars, the least and the greatest of them at both ends of the scale."""
    if not values:
        return ""
    least, most = min(values), max(values)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BARS[round((value - least) * scale)] for value in values)
