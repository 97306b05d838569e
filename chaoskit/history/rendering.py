"""Rendering of comparisons and histories: a sentence, tables, Markdown, and sparklines."""

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
    """Return a summary such as ``1 regressed, 5 unchanged, 2 undecided; 1 series had no run``."""
    counts = comparison.changes()
    summary = (
        ", ".join(f"{counts[change]} {change.value}" for change in NumberChange if counts[change])
        or "nothing was compared"
    )
    absent = f"; {len(comparison.absent)} earlier series had no run" if comparison.absent else ""
    runs = sum(comparison.uncounted.values())
    uncounted = f"; {plural(runs, 'run')} not counted" if runs else ""
    return f"{summary}{absent}{uncounted}"


def render_comparison(comparison: RunComparison) -> DataTable:
    """Return a table of all changes, regressions first. Unchanged numbers are left out."""
    table = findings_table("test and number", "before", "now", "ratio")
    for finding in top_changes(comparison):
        subject = Text.assemble(
            printable(f"{finding.title}: {finding.metric}"), *_reason_lines(finding)
        )
        mark = Text(finding.change.value, _STYLES[finding.change])
        table.add_row(
            mark,
            subject,
            value_text(finding, finding.before),
            value_text(finding, finding.after),
            ratio_text(finding),
        )
    return table


def findings_table(heading: str, *numbers: str) -> DataTable:
    """Return an empty table for terminals with columns for a state, a subject and numbers.

    Args:
        heading: the header of the subjects.
        numbers: the headers of the numbers.
    """
    text = Column(heading, is_text=True, is_heading=True)
    return DataTable(
        Column("", is_heading=True), text, *(Column(name, is_number=True) for name in numbers)
    )


def top_changes(comparison: RunComparison) -> list[NumberFinding]:
    """Return the findings that are not *unchanged*, in the order of :class:`NumberChange`.

    Regressions come first.
    """
    order = list(NumberChange)
    shown = (
        finding for finding in comparison.findings if finding.change is not NumberChange.UNCHANGED
    )
    return sorted(shown, key=lambda finding: order.index(finding.change))


def _reason_lines(finding: NumberFinding) -> list[tuple[str, str]]:
    """Return the reasons of a finding as lines below its subject, each with the style *dim*."""
    return [(f"\n{printable(reason)}", "dim") for reason in _reasons(finding)]


def _reasons(finding: NumberFinding) -> list[str]:
    """Return the reasons of a finding that are not empty."""
    return [reason for reason in (finding.reason, finding.accepted) if reason]


def value_text(finding: NumberFinding, amount: float | None) -> str:
    """Format a value of a finding in its unit; "–" if it is None.

    A counted number is the share of runs that missed it.
    """
    if amount is None:
        return "–"
    if finding.unit == "s":
        return duration(amount)
    return f"{number(amount)} x" if finding.unit == "ratio" else f"{amount:.0%}"


def ratio_text(finding: NumberFinding) -> str:
    """Format a ratio as ``1.24 (1.11 .. 1.38)``; "" for a finding without a ratio.

    An interval without an upper end is left out.
    """
    ratio = finding.ratio
    if ratio is None:
        return ""
    interval = f" ({ratio.low:.2f} .. {ratio.high:.2f})" if ratio.high < float("inf") else ""
    return f"{ratio.ratio:.2f}{interval}"


def markdown(comparison: RunComparison, heading: str = "chaoskit") -> str:
    """Return the comparison as Markdown, for a CI summary or a comment on a pull request.

    Unchanged numbers are left out. Changes beyond the first 200 are only counted, in the order of
    :func:`top_changes`. Earlier series that have no run now are named.
    """
    lines = [f"### {heading}: {comparison_sentence(comparison)}", ""]
    if rows := top_changes(comparison):
        lines += ["| | test | number | before | now | ratio | |", "|---|---|---|---|---|---|---|"]
        for finding in rows[:_MARKDOWN_ROWS]:
            cells = [_MARKS.get(finding.change, "❔"), cell(finding.title), cell(finding.metric)]
            cells += [
                value_text(finding, finding.before),
                value_text(finding, finding.after),
                ratio_text(finding),
            ]
            lines.append(
                f"| {' | '.join(cells)} | {cell(': '.join([finding.change.value, *_reasons(finding)]))} |"
            )
        if len(rows) > _MARKDOWN_ROWS:
            lines.append(f"\nand {len(rows) - _MARKDOWN_ROWS} more")
    lines += [f"\nNo run now: {cell(title)}" for title in comparison.absent]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    """Return text that is escaped for a cell of a Markdown table, including mentions and links."""
    return _MARKUP.sub(r"\\\g<0>", printable(text).replace("\n", " "))


def sparkline(values: Sequence[float]) -> str:
    """Return values as bars; "" without values. The least and the greatest value span the scale."""
    if not values:
        return ""
    least, most = min(values), max(values)
    scale = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BARS[round((level - least) * scale)] for level in values)
