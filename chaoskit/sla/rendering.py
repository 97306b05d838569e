"""Rendering of judged SLAs: a sentence, a table for terminals, and Markdown.

-> history/rendering.py: the table and the escaped cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from chaoskit.history.rendering import cell, findings_table
from chaoskit.plaintext import printable
from chaoskit.report.tables import DataTable
from chaoskit.sla.judge import Judged, State

_STYLES = {
    State.BROKEN: "bold red",
    State.UNKNOWN: "bold yellow",
    State.NOT_SHOWN: "yellow",
    State.MET: "green",
}
_MARKS = {State.BROKEN: "❌", State.UNKNOWN: "❔", State.NOT_SHOWN: "❔", State.MET: "✅"}


def sla_sentence(judged: Sequence[Judged]) -> str:
    """Return a summary such as ``1 broken, 2 not shown, 5 met``."""
    counts = Counter(line.state for line in judged)
    return (
        ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        or "nothing is promised"
    )


def render_sla(judged: Sequence[Judged]) -> DataTable:
    """Return a table of all lines with their states, the worst first."""
    table = findings_table("SLA and line", "runs", "misses", "unknown")
    for line in worst_first(judged):
        subject = Text.assemble(
            printable(f"{line.sla}: {line.line}"),
            *((f"\n{detail}", "dim") for detail in _detail_lines(line)),
        )
        table.add_row(
            Text(line.state.value, _STYLES[line.state]),
            subject,
            str(line.runs),
            str(line.misses),
            str(line.unknown),
        )
    return table


def worst_first(judged: Sequence[Judged]) -> list[Judged]:
    """Return the judged lines, the worst first."""
    order = list(State)
    return sorted(judged, key=lambda line: order.index(line.state))


def _detail_lines(judged: Judged) -> list[str]:
    """Return the reason and, for broken lines, the latest runs that missed the limit."""
    details = [judged.reason] if judged.reason else []
    if judged.state is State.BROKEN and judged.missed:
        details.append(f"the latest: {', '.join(judged.missed)}")
    return [printable(detail) for detail in details]


def sla_markdown(judged: Sequence[Judged]) -> str:
    """Return the states as Markdown, for the summary of a CI job."""
    lines = [
        f"### SLAs: {sla_sentence(judged)}",
        "",
        "| | SLA | line | runs | misses | unknown | |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in worst_first(judged):
        cells = [
            _MARKS[line.state],
            cell(line.sla),
            f"{cell(line.line)}",
            str(line.runs),
            str(line.misses),
            str(line.unknown),
        ]
        lines.append(
            f"| {' | '.join(cells)} | {cell(': '.join(filter(None, [line.state.value, line.reason])))} |"
        )
    return "\n".join([*lines, ""])
