"""``chaoskit rules``: try log rules on recorded logs.

-> rules/replay.py: the replay and its suggestions. rules/engine.py: when a rule fires.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, print_json
from chaoskit.errors import BadInput, closest_name
from chaoskit.report.tables import Column, DataTable
from chaoskit.rules import RuleVerdict, read_rules, replay_log
from chaoskit.rules.replay import Replay, spread, suggest
from chaoskit.rules.timestamps import show_time

app = command_app("Try log rules on recorded logs before they restart a job.")


@app.command("test")
def try_rules(
    rules: Annotated[
        Path,
        typer.Argument(
            help="YAML or JSON: a list of rules, or a HyperPod job with logMonitoringConfiguration in it."
        ),
    ],
    log: Annotated[
        Path, typer.Argument(help="Log of the job, with a timestamp at the start of lines.")
    ],
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:VERDICT",
            help="Rule that must fire with this verdict: slow, hanging, not-a-number or faulted; "
            "repeatable.",
        ),
    ] = None,
    period_s: Annotated[
        float | None,
        typer.Option(help="For a log without timestamps: seconds from a line to the next."),
    ] = None,
    tail_s: Annotated[
        float,
        typer.Option(help="Seconds for which the job was watched after the last line, if it hung."),
    ] = 0.0,
    is_json: Json = False,
) -> int:
    """Run rules over a recorded log, and show what would have fired, when, and with which action.

    Rules are read like those of HyperPod's training operator. Timestamps are ISO 8601, Python
    logging's or epochs. Times without a zone count as UTC.

    Limits that are far from the waits in the log get a suggestion: twice the longest wait that did
    not count as hanging.

    Exit code 0: no rule fired, 1: a rule fired, 2: bad input. With [bold]--expect[/] 0: exactly the
    expected rules fired, 1: another rule fired, or an expected one did not.

    Examples: [cyan]chaoskit rules test job.yaml healthy.log[/], [cyan]chaoskit rules test job.yaml
    hung.log --tail-s 600 --expect JobHangingDetection:hanging[/]
    """
    parsed_rules = read_rules(rules)
    expected_alarms = _parse_expected(expect or [], {rule.name for rule in parsed_rules})
    replays = replay_log(parsed_rules, log, period_s=period_s, tail_s=tail_s)
    fired = {(alarm.rule, alarm.verdict.value) for replayed in replays for alarm in replayed.alarms}
    ok = fired == expected_alarms
    if is_json:
        expected = [{"rule": name, "verdict": verdict} for name, verdict in sorted(expected_alarms)]
        print_json(
            {"ok": ok, "expected": expected, "rules": [plain(replayed) for replayed in replays]}
        )
        return 0 if ok else EXIT_FAILED
    terminal = console()
    terminal.print(render(replays))
    for name, verdict in sorted(expected_alarms - fired):
        terminal.print(f"expected, and did not fire: {name}: {verdict}", style="red")
    for name, verdict in sorted(fired - expected_alarms) if expected_alarms else ():
        terminal.print(f"not expected: {name}: {verdict}", style="red")
    return 0 if ok else EXIT_FAILED


def _parse_expected(pairs: list[str], names: set[str]) -> set[tuple[str, str]]:
    """Return the rule and the verdict of each NAME:VERDICT pair.

    Args:
        names: the names of the rules.

    Raises:
        BadInput: if a name or a verdict does not exist.
    """
    verdicts = [verdict.value for verdict in RuleVerdict if verdict != RuleVerdict.STOPPED]
    alarms = set()
    for pair in pairs:
        name, _, verdict = pair.rpartition(":")
        if name not in names:
            example = closest_name(name, names) or "NAME"
            raise BadInput(
                "expect", pair, f"write {example}:VERDICT with one of {', '.join(sorted(names))}"
            )
        if verdict not in verdicts:
            raise BadInput("expect", pair, f"write NAME:VERDICT with one of {', '.join(verdicts)}")
        alarms.add((name, verdict))
    return alarms


def plain(replayed: Replay) -> dict[str, Any]:
    """Return the replay of one rule as JSON values.

    Times are seconds since 1970, or since the start of the log.
    """
    points = replayed.points
    return {
        "name": replayed.rule.name,
        "points": len(points),
        "first_s": points[0].time_s if points else None,
        "last_s": points[-1].time_s if points else None,
        "gap_s": _spread_json(spread(replayed.gaps_s)),
        "value": _spread_json(spread(replayed.values)),
        "fired": [msgspec.to_builtins(alarm) for alarm in replayed.fired],
        "warnings": replayed.warnings,
        "suggestions": [msgspec.to_builtins(hint) for hint in suggest(replayed)],
    }


def _spread_json(values: tuple[float, float, float] | None) -> dict[str, float] | None:
    """Return a spread as a JSON object; None if there is none."""
    return dict(zip(("min", "median", "max"), values, strict=True)) if values else None


def render(replays: list[Replay]) -> RenderableType:
    """Return the replays of all rules as a table, alarms in the order of time, and hints."""
    rule = Column("rule", is_heading=True)
    table = DataTable(
        rule, Column("points", is_number=True), *map(Column, ("first", "last", "gaps, s", "metric"))
    )
    for replayed in replays:
        ends = (
            [show_time(point.time_s) for point in (replayed.points[0], replayed.points[-1])]
            if replayed.points
            else ["", ""]
        )
        table.add_row(
            Text(replayed.rule.name),
            str(len(replayed.points)),
            *ends,
            _spread_text(replayed.gaps_s),
            _spread_text(replayed.values),
        )
    lines: list[RenderableType] = [Text("gaps and metrics: least / median / greatest", "dim")]
    alarms = sorted(
        (fired for replayed in replays for fired in replayed.fired), key=lambda fired: fired.time_s
    )
    for fired in alarms:
        text = f"{show_time(fired.time_s)}  {fired.rule}: {fired.verdict}, {fired.reason}"
        stopped = fired.verdict == RuleVerdict.STOPPED
        lines.append(
            Text(text if stopped else f"{text} -> {fired.action}", "" if stopped else "red")
        )
    if not any(replayed.alarms for replayed in replays):
        lines.append(Text("nothing would have fired", "green"))
    for replayed in replays:
        lines += [
            Text(f"warning: {replayed.rule.name}: {warning}", "yellow")
            for warning in replayed.warnings
        ]
        for hint in suggest(replayed):
            setting = f"{replayed.rule.name}: {hint.field}={hint.setting_s:g}"
            text = f"hint: {setting}; {hint.suggested_s:g} would fit:"
            lines.append(Text(f"{text} {hint.reason}", "dim"))
    return Group(table, *lines)


def _spread_text(values: list[float]) -> str:
    """Format least, median and greatest value; empty if there are none."""
    summary = spread(values)
    return " / ".join(f"{number:.4g}" for number in summary) if summary else ""
