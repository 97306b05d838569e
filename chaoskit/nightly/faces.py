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
from chaoskit.plaintext import plural, printable
from chaoskit.report import svg, words
from chaoskit.report.summary import duration, long_duration, number

#: What a comment on a pull request, or the summary of a job, takes.
MARKDOWN_BYTES = 60_000
_HEIGHT, _HEAD = 96, 18  # of a chart, and of its part above all points
_MARKS = {0: "✓", 1: "✕", 10: "?", 11: "!"}
_STATES = {0: "passed", 1: "failed", 10: "unknown", 11: "error"}


def report_json(report: NightReport) -> dict[str, Any]:
    """All parts as JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def report_html(report: NightReport) -> str:
    """One page: styles and pictures are inside."""
    worse = {one.finding.series for one in report.regressions if one.finding is not None}
    places = [Path(__file__).parent, Path(svg.__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(places),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=duration, long_duration=long_duration, number=number, plural=plural
    )
    return environment.get_template("night.html.j2").render(
        report=report,
        night=report.night,
        state=_STATES[report.night.exit_code],
        mark=_MARKS[report.night.exit_code],
        began=_when(report),
        palette=svg.PALETTE,
        between=_between(report),
        units=[unit for unit in report.night.units if unit.part != "comparison"],
        curves=[
            (curve, *_named(curve.title), picture(curve, is_worse=curve.series in worse))
            for curve in report.curves
        ],
        since=_since,
        shown=value_text,
        ratio=ratio_text,
        words=words,
    )


def _when(report: NightReport) -> str:
    return f"{datetime.fromtimestamp(report.night.started_unix_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"


def _since(commits: tuple[str, str]) -> str:
    """``since 1a2b3c4d5e, not yet in 9f8e7d6c5b``."""
    good, bad = (commit[:10] for commit in commits)
    return f"since {bad or 'this night'}" + (f", not yet in {good}" if good else "")


def _between(report: NightReport) -> str:
    """The commits between which regressions came: ``9f8e7d6c5b .. 1a2b3c4d5e``."""
    against, commit = report.night.against, report.night.commit
    return f"{against[:10]} .. {commit[:10]}" if against else ""


def _named(title: str) -> tuple[str, str]:
    """The file of a test, and its name."""
    file, _, name = title.rpartition("::")
    return file, name


def picture(curve: Curve, *, is_worse: bool) -> Markup:
    """A small chart of a series: a dot a night with the range of its runs, from 0, below the greatest value."""
    most = max((point.high for point in curve.points), default=0.0)
    across = svg.Scale.linear(0, max(1, len(curve.points) - 1), 2, 98)
    down = svg.Scale.linear(0.0, most or 1.0, _HEIGHT - 6, _HEAD + 3)
    marks = [
        svg.tag("line", x1=0, x2="100%", y1=_HEIGHT - 6, y2=_HEIGHT - 6, stroke=svg.colour("grid"))
    ]
    for place, point in enumerate(curve.points):
        x, latest = svg.percent(across(place)), place == len(curve.points) - 1
        told = f"{point.day}: {duration(point.middle)}, from {duration(point.low)} to {duration(point.high)}"
        shade = "var(--failed)" if latest and is_worse else svg.colour("run" if latest else "muted")
        marks.append(
            svg.tag(
                "line",
                x1=x,
                x2=x,
                y1=down(point.low),
                y2=down(point.high),
                stroke=shade,
                opacity=0.5,
            )
        )
        marks.append(
            svg.tag(
                "circle",
                svg.tag("title", told),
                cx=x,
                cy=down(point.middle),
                r=3 if latest else 2,
                fill=shade,
            )
        )
    marks.append(svg.label(f"slowest: {duration(most)}", 0, 10))
    title = f"recovery over {plural(len(curve.points), 'night')}, at most {duration(most)}"
    return svg.tag("svg", *marks, width="100%", height=_HEIGHT, role="img", aria_label=title)


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
                + "".join(map(_command, one.replay))
                for one in report.broken
            ],
        ),
        (
            "Regressions",
            [
                f"{_finding_line(one.finding)}, {_between(report)}{_command(one.replay)}"
                for one in report.regressions
                if one.finding is not None
            ],
        ),
        (
            "Tests that failed",
            [
                f"{cell(one.unit.test)}: {cell(one.unit.troubles[0])}{_command(one.replay)}"
                for one in report.troubles
                if one.unit is not None
            ],
        ),
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
        ("Better", [_finding_line(one) for one in report.better]),
        ("Changed since the night before", [cell(line) for line in report.changed]),
        ("Also", [cell(line) for line in report.lines]),
        (
            "Experiments",
            [
                f"{cell(one.title)}: {one.recovered} of {plural(one.runs, 'run')} recovered, {one.passed} passed"
                + (f", {duration(one.points[-1].middle)}" if one.points else "")
                for one in report.curves
            ],
        ),
    ]


def _command(line: str) -> str:
    return f"; `{printable(line).replace('`', '')}`" if line else ""


def _finding_line(one: NumberFinding) -> str:
    told = [
        value_text(one, one.before),
        value_text(one, one.after),
        ratio_text(one),
        one.reason,
        one.accepted,
    ]
    return (
        f"{cell(one.title)}: {cell(one.metric)}: {', '.join(cell(part) for part in told if part)}"
    )
