"""What records show of SLAs, for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from chaoskit.plaintext import printable
from chaoskit.sla.judge import Judged, State

_STYLES = {State.BROKEN: "bold red", State.UNKNOWN: "bold yellow", State.NOT_SHOWN: "yellow", State.MET: "green"}
_MARKUP = re.compile(r"[|<>`@\[\]\\]")
_MARKS = {State.BROKEN: "❌", State.UNKNOWN: "❔", State.NOT_SHOWN: "❔", State.MET: "✅"}


def sla_sentence(judged: Sequence[Judged]) -> str:
    """``1 broken, 2 not shown, 5 met``."""
    counts = Counter(one.state for one in judged)
    return ", ".join(f"{counts[state]} {state.value}" for state in State if counts[state]) or "nothing is promised"


def render_sla(judged: Sequence[Judged]) -> Table:
    """Each line with its state, the worst first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("SLA and line", overflow="fold", ratio=1)
    for name in ("runs", "misses", "unknown"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in worst_first(judged):
        what = Text.assemble(printable(f"{one.sla}: {one.line}"), *((f"\n{line}", "dim") for line in _secondary(one)))
        table.add_row(Text(one.state.value, _STYLES[one.state]), what, str(one.runs), str(one.misses), str(one.unknown))
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
            _cell(one.sla),
            f"{_cell(one.line)}",
            str(one.runs),
            str(one.misses),
            str(one.unknown),
        ]
        lines.append(f"| {' | '.join(cells)} | {_cell(': '.join(filter(None, [one.state.value, one.reason])))} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", printable(text).replace("\n", " "))
