"""Print the table of measurements in the README; ``python docs/generate/figures.py --write`` puts
it there.

Every number comes from ``benchmarks/results/*.json``, which the benchmarks write.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- written by docs/generate/figures.py -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Row:
    """A row of the table, made from one bar of ``benchmarks/results/{file}.json``.

    Args:
        what: text of the first column.
        bar: begin of the name of the bar.
        file: name of the file, without its suffix.
    """

    what: str
    bar: str
    file: str = "latest"

    def render(self, summaries: dict[str, dict[str, Any]]) -> str:
        """Return the row, from the summary of ratios in pairs of runs, or of seconds."""
        if "ratios" in summaries:
            ratios = summaries["ratios"]
            return f"| {self.what} | {ratios['median']:.2f} x | {ratios['max']:.2f} x | {ratios['count']} pairs |"
        seconds = summaries["seconds"]
        median_ms, max_ms = seconds["median"] * 1e3, seconds["max"] * 1e3
        return f"| {self.what} | {median_ms:.0f} ms | {max_ms:.0f} ms | {seconds['count']} runs |"


ROWS = (
    Row(
        "no fault, 2 ranks: a step, beside DDP with the same allocator",
        "no fault, exact, 2 ranks:",
        "overhead",
    ),
    Row("no fault, 4 ranks", "no fault, exact, 4 ranks:", "overhead"),
    Row(
        "SIGKILL of a rank, a warm spare: the next step of all ranks",
        "SIGKILL, a warm spare: every rank's next step",
    ),
    Row("SIGSTOP of a rank", "SIGSTOP: every rank's next step"),
    Row(
        "a hang that nothing announces (it holds the GIL)",
        "hang that holds the GIL: every rank's next step",
    ),
    Row("a NaN on one rank", "NaN on one rank: every rank's next step"),
    Row("a node whose network falls silent", "silent cut: every rank's next step", "network"),
    Row(
        "FSDP2, 0.5 s a step: SIGKILL of a rank",
        "FSDP2, SIGKILL of a rank: every rank's next step",
        "sharded",
    ),
    Row(
        "FSDP2, 0.5 s a step: loss of a node",
        "FSDP2, loss of a node: every rank's next step",
        "sharded",
    ),
)


def table(results: Path = ROOT / "benchmarks" / "results") -> str:
    """Return the table, and a line about machine and dates."""
    reports = {
        file: json.loads((results / f"{file}.json").read_text())
        for file in dict.fromkeys(r.file for r in ROWS)
    }
    rows = [row.render(_summaries(reports[row.file], row.bar)) for row in ROWS]
    machine = reports[ROWS[0].file]["machine"]
    dates = ", ".join(sorted({report["machine"]["date"][:10] for report in reports.values()}))
    facts = f"{machine['cores']} cores ({machine['processor']}), torch {machine['torch']} with gloo; measured {dates}."
    return "\n".join(
        ["| what happens | median | worst | of |", "| --- | --- | --- | --- |", *rows, "", facts]
    )


def _summaries(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    bars: list[dict[str, Any]] = [bar for bar in report["bars"] if bar["name"].startswith(name)]
    if len(bars) != 1:
        raise SystemExit(
            f"benchmarks/results: {len(bars)} bars begin with {name!r}, not one; run the benchmarks"
        )
    summaries: dict[str, dict[str, Any]] = bars[0]["summaries"]
    return summaries


def main() -> None:
    """Print the table, or write it into the README."""
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    readme = ROOT / "README.md"
    if readme.read_text(encoding="utf-8").count(END) != 1:
        raise SystemExit(f"{readme}: the line {END!r} must stand there once")
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
