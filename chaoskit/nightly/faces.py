"""The report on a night: one HTML file that loads nothing, Markdown for CI and chats, JSON for machines."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from chaoskit.history.faces import cell, ratio_text, value_text
from chaoskit.history.finding import NumberFinding
from chaoskit.nightly.report import Curve, NightReport
from chaoskit.report import svg
from chaoskit.report.summary import duration, number, plural

#: What a comment on a pull request, or the summary of a job, takes.
MARKDOWN_BYTES = 60_000
_HEIGHT = 84
_MARKS = {0: "✓", 1: "✕", 2: "!", 10: "?", 11: "!"}
_STATES = {0: "passed", 1: "failed", 2: "error", 10: "unknown", 11: "error"}


def report_json(report: NightReport) -> dict[str, Any]:
    """All parts as JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def report_html(report: NightReport) -> str:
    """One page: styles and pictures are inside."""
    places = [Path(__file__).parent, Path(svg.__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(places),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, number=number, plural=plural)
    return environment.get_template("night.html.j2").render(
        report=report,
        night=report.night,
        state=_STATES.get(report.night.exit_code, "error"),
        mark=_MARKS.get(report.night.exit_code, "!"),
        began=_when(report),
        palette=svg.PALETTE,
        rows=_rows(report),
        units=[unit for unit in report.night.units if unit.part != "comparison"],
        curves=[(curve, picture(curve)) for curve in report.curves],
        since=_since,
        shown=value_text,
        ratio=ratio_text,
    )


def _when(report: NightReport) -> str:
    return f"{datetime.fromtimestamp(report.night.started_unix_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"


def _since(commits: tuple[str, str]) -> str:
    """``since 1a2b3c4 (last good: 9f8e7d6)``."""
    good, bad = (commit[:10] for commit in commits)
    return f"since {bad or 'this night'}" + (f", last good {good}" if good else "")


def _rows(report: NightReport) -> list[tuple[NumberFinding, str]]:
    """Regressions, with the commits between which they came."""
    against, commit = report.night.against, report.night.commit
    return [(one, f"{against[:10]} .. {commit[:10]}" if against else "") for one in report.regressions]


def picture(curve: Curve) -> Markup:
    """A small chart of a series: a dot a night with the range of its runs, from 0."""
    most = max((point.high for point in curve.points), default=0.0)
    across = svg.Scale.linear(0, max(1, len(curve.points) - 1), 2, 98)
    down = svg.Scale.linear(0.0, most or 1.0, _HEIGHT - 6, 6)
    marks = [svg.tag("line", x1=0, x2="100%", y1=_HEIGHT - 6, y2=_HEIGHT - 6, stroke=svg.colour("grid"))]
    for place, point in enumerate(curve.points):
        x, latest = svg.percent(across(place)), place == len(curve.points) - 1
        told = f"{point.day}: {duration(point.middle)}, from {duration(point.low)} to {duration(point.high)}"
        shade = svg.colour("run" if latest else "muted")
        marks.append(svg.tag("line", x1=x, x2=x, y1=down(point.low), y2=down(point.high), stroke=shade, opacity=0.5))
        marks.append(
            svg.tag("circle", svg.tag("title", told), cx=x, cy=down(point.middle), r=3 if latest else 2, fill=shade)
        )
    words = f"recovery over {plural(len(curve.points), 'night')}, at most {duration(most)}"
    return svg.tag("svg", *marks, width="100%", height=_HEIGHT, role="img", aria_label=words)


def report_markdown(report: NightReport) -> str:
    """The same in Markdown, cut where a comment would be too long."""
    lines = [f"## {report.night.name}, {_when(report)}: {cell(report.sentence)}", ""]
    for heading, rows in _sections(report):
        if rows:
            lines += [f"### {heading}", "", *(f"- {row}" for row in rows), ""]
    text = "\n".join(lines)
    if len(text.encode()) <= MARKDOWN_BYTES:
        return text
    cut = text.encode()[: MARKDOWN_BYTES - 40].decode(errors="ignore").rpartition("\n")[0]
    return f"{cut}\n\nand more: see the report\n"


def _sections(report: NightReport) -> list[tuple[str, list[str]]]:
    return [
        (
            "Broken SLAs",
            [
                f"**{cell(one.judged.sla)}**: {cell(one.judged.line)}: {cell(one.judged.reason)}, {_since(one.since)}"
                + "".join(f"; `{line}`" for line in one.replay)
                for one in report.broken
            ],
        ),
        ("Regressions", [_finding_line(one, between) for one, between in _rows(report)]),
        ("Tests that failed", [f"{cell(unit.test)}: {cell(unit.troubles[0])}" for unit in report.troubles]),
        ("What did not run", [cell(line) for line in report.not_run]),
        (
            "Budgets",
            [
                f"{cell(one.sla)}: {cell(one.line)}: {one.misses} of {one.allowed:.1f} misses spent"
                for one in report.budgets
            ],
        ),
        (
            "Accepted regressions that expire soon",
            [f"{one.series}: until {one.until}: {cell(one.reason)}" for one in report.expiring],
        ),
        ("Better", [_finding_line(one, "") for one in report.better]),
        ("Changed since the night before", [cell(line) for line in report.changed]),
        ("Also", [cell(line) for line in report.lines]),
        (
            "Experiments",
            [
                f"{cell(one.title)}: {one.recovered} of {plural(one.runs, 'run')} passed"
                + (f", {duration(one.points[-1].middle)}" if one.points else "")
                for one in report.curves
            ],
        ),
    ]


def _finding_line(one: NumberFinding, between: str) -> str:
    told = [value_text(one, one.before), value_text(one, one.after), ratio_text(one), one.reason, one.accepted, between]
    return f"{cell(one.title)}: {cell(one.metric)}: {', '.join(cell(part) for part in told if part)}"
