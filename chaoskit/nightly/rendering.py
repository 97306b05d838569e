"""Rendering of a night's report: one self-contained HTML file, Markdown for CI and chats, JSON.

-> nightly/report.py: the contents. nightly/outcome.py: its sentence. report/html.py: single runs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from chaoskit.history.finding import NumberFinding
from chaoskit.history.rendering import cell, ratio_text, value_text
from chaoskit.nightly.report import Curve, NightReport
from chaoskit.plaintext import plural, printable
from chaoskit.report import svg, words
from chaoskit.report.summary import duration, long_duration, number

#: The largest size of a comment on a pull request, or of the summary of a CI job.
MARKDOWN_BYTES = 60_000
_HEIGHT, _HEAD = 96, 18  # height of a chart, and of the part above all points, in pixels
_MARKS = {0: "✓", 1: "✕", 10: "?", 11: "!"}
_STATES = {0: "passed", 1: "failed", 10: "unknown", 11: "error"}


def report_json(report: NightReport) -> dict[str, Any]:
    """Return all parts of a report as JSON values."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    return document


def report_html(report: NightReport) -> str:
    """Return the report as one page that contains its styles and pictures."""
    worse = {
        regression.finding.series
        for regression in report.regressions
        if regression.finding is not None
    }
    template_directories = [Path(__file__).parent, Path(svg.__file__).parent]
    environment = Environment(
        loader=FileSystemLoader(template_directories),
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
        began=_start_text(report),
        palette=svg.PALETTE,
        between=_commit_range(report),
        units=[unit for unit in report.night.units if unit.part != "comparison"],
        curves=[
            (curve, *_split_title(curve.title), picture(curve, is_worse=curve.series in worse))
            for curve in report.curves
        ],
        since=_since,
        shown=value_text,
        ratio=ratio_text,
        words=words,
    )


def _start_text(report: NightReport) -> str:
    """Return the start of the night, in UTC."""
    return f"{datetime.fromtimestamp(report.night.started_unix_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"


def _since(commits: tuple[str, str]) -> str:
    """Return a text such as ``since 1a2b3c4d5e, not yet in 9f8e7d6c5b``."""
    good_commit, bad_commit = (commit[:10] for commit in commits)
    return f"since {bad_commit or 'this night'}" + (
        f", not yet in {good_commit}" if good_commit else ""
    )


def _commit_range(report: NightReport) -> str:
    """Return the commits between which regressions came, such as ``9f8e7d6c5b .. 1a2b3c4d5e``."""
    against, commit = report.night.against, report.night.commit
    return f"{against[:10]} .. {commit[:10]}" if against else ""


def _split_title(title: str) -> tuple[str, str]:
    """Return the file of a test, or "", and its name."""
    file, _, name = title.rpartition("::")
    return file, name


def picture(curve: Curve, *, is_worse: bool) -> Markup:
    """Return a chart of a series: for each night the median and the range of its recoveries.

    The vertical axis is linear and begins at 0.
    """
    longest_s = max((point.high for point in curve.points), default=0.0)
    across = svg.AxisScale.linear(0, max(1, len(curve.points) - 1), 2, 98)
    down = svg.AxisScale.linear(0.0, longest_s or 1.0, _HEIGHT - 6, _HEAD + 3)
    marks = [
        svg.tag("line", x1=0, x2="100%", y1=_HEIGHT - 6, y2=_HEIGHT - 6, stroke=svg.colour("grid"))
    ]
    for index, point in enumerate(curve.points):
        left, latest = svg.percent(across(index)), index == len(curve.points) - 1
        label = f"{point.day}: {duration(point.middle)}, from {duration(point.low)} to {duration(point.high)}"
        shade = "var(--failed)" if latest and is_worse else svg.colour("run" if latest else "muted")
        marks.append(
            svg.tag(
                "line",
                x1=left,
                x2=left,
                y1=down(point.low),
                y2=down(point.high),
                stroke=shade,
                opacity=0.5,
            )
        )
        marks.append(
            svg.tag(
                "circle",
                svg.tag("title", label),
                cx=left,
                cy=down(point.middle),
                r=3 if latest else 2,
                fill=shade,
            )
        )
    marks.append(svg.label(f"slowest: {duration(longest_s)}", 0, 10))
    title = f"recovery over {plural(len(curve.points), 'night')}, at most {duration(longest_s)}"
    return svg.tag("svg", *marks, width="100%", height=_HEIGHT, role="img", aria_label=title)


def report_markdown(report: NightReport) -> str:
    """Return the report as Markdown, cut to :data:`MARKDOWN_BYTES`."""
    lines = [f"## {report.night.name}, {_start_text(report)}: {cell(report.sentence)}", ""]
    for heading, rows in _sections(report):
        if rows:
            lines += [f"### {heading}", "", *(f"- {row}" for row in rows), ""]
    text = "\n".join(lines)
    if len(text.encode()) <= MARKDOWN_BYTES:
        return text
    cut = text.encode()[: MARKDOWN_BYTES - 40].decode(errors="ignore").rpartition("\n")[0]
    return f"{cut}\n\nand more: see the report\n"


def _sections(report: NightReport) -> list[tuple[str, list[str]]]:
    """Return the headings of the report with their rows.

    Sections without rows are left out later.
    """
    return [
        (
            "Broken SLAs",
            [
                f"**{cell(sla.judged.sla)}**: {cell(sla.judged.line)}: {cell(sla.judged.reason)}, {_since(sla.since)}"
                + "".join(map(_command, sla.replay))
                for sla in report.broken
            ],
        ),
        (
            "Regressions",
            [
                f"{_finding_line(regression.finding)}, {_commit_range(report)}{_command(regression.replay)}"
                for regression in report.regressions
                if regression.finding is not None
            ],
        ),
        (
            "Tests that failed",
            [
                f"{cell(failed.unit.test)}: {cell(failed.unit.troubles[0])}{_command(failed.replay)}"
                for failed in report.troubles
                if failed.unit is not None
            ],
        ),
        ("What did not run", [cell(line) for line in report.not_run]),
        (
            "Budgets",
            [
                f"{cell(budget.sla)}: {cell(budget.line)}: {budget.misses} of {budget.allowed:.1f} misses spent"
                for budget in report.budgets
            ],
        ),
        (
            "Accepted regressions that expire soon",
            [
                f"{accepted.series}: until {accepted.until}: {cell(accepted.reason)}"
                for accepted in report.expiring
            ],
        ),
        ("Better", [_finding_line(finding) for finding in report.better]),
        ("Changed since the night before", [cell(line) for line in report.changed]),
        ("Also", [cell(line) for line in report.lines]),
        (
            "Experiments",
            [
                f"{cell(test.title)}: {test.recovered} of {plural(test.runs, 'run')} recovered, {test.passed} passed"
                + (f", {duration(test.points[-1].middle)}" if test.points else "")
                for test in report.curves
            ],
        ),
    ]


def _command(line: str) -> str:
    """Return a command as Markdown, to be appended to a row."""
    return f"; `{printable(line).replace('`', '')}`" if line else ""


def _finding_line(finding: NumberFinding) -> str:
    """Return a finding as one line of Markdown."""
    parts = [
        value_text(finding, finding.before),
        value_text(finding, finding.after),
        ratio_text(finding),
        finding.reason,
        finding.accepted,
    ]
    return f"{cell(finding.title)}: {cell(finding.metric)}: {', '.join(cell(part) for part in parts if part)}"
