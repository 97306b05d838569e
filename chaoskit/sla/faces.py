"""What records show of SLAs, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from chaoskit.history.faces import cell, findings_table
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
    """``1 broken, 2 not shown, 5 met``."""
    counts = Counter(one.state for one in judged)
    return (
        ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state])
        or "nothing is promised"
    )


def render_sla(judged: Sequence[Judged]) -> DataTable:
    """Each line with its state, the worst first."""
    table = findings_table("SLA and line", "runs", "misses", "unknown")
    for one in worst_first(judged):
        what = Text.assemble(
            printable(f"{one.sla}: {one.line}"), *((f"\n{line}", "dim") for line in _secondary(one))
        )
        table.add_row(
            Text(one.state.value, _STYLES[one.state]),
            what,
            str(one.runs),
            str(one.misses),
            str(one.unknown),
        )
    return table


def worst_first(judged: Sequence[Judged]) -> list[Judged]:
    """In the order in which people must see them."""
    order = list(State)
    return sorted(judged, key=lambda one: order.index(one.state))


def _secondary(judged: Judged) -> list[str]:
    told = [judged.reason] if judged.reason else []
    if judged.state is State.BROKEN and judged.missed:
        told.append(f"the latest: {', '.join(judged.missed)}")
    return [printable(line) for line in told]


def sla_markdown(judged: Sequence[Judged]) -> str:
    """For the summary of a CI job."""
    lines = [
        f"### SLAs: {sla_sentence(judged)}",
        "",
        "| | SLA | line | runs | misses | unknown | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in worst_first(judged):
        cells = [
            _MARKS[one.state],
            cell(one.sla),
            f"{cell(one.line)}",
            str(one.runs),
            str(one.misses),
            str(one.unknown),
        ]
        lines.append(
            f"| {' | '.join(cells)} | {cell(': '.join(filter(None, [one.state.value, one.reason])))} |"
        )
    return "\n".join([*lines, ""])
