"""``chaoskit rules``: log rules on recorded logs."""

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
        Path, typer.Argument(help="What the job printed, with a timestamp at the start of lines.")
    ],
    expect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:VERDICT",
            help="This rule shall fire so: slow, hanging, not-a-number, faulted. Repeatable.",
        ),
    ] = None,
    period_s: Annotated[
        float | None,
        typer.Option(help="For a log without timestamps: seconds from a line to the next."),
    ] = None,
    tail_s: Annotated[
        float,
        typer.Option(
            help="The log was watched for so many seconds after its last line: a job that hung."
        ),
    ] = 0.0,
    machine: Json = False,
) -> int:
    """Run rules over a recorded log: what would have fired, when, and with which action.

    Rules are read as HyperPod's training operator has them. Timestamps are ISO 8601,
    Python logging's or epochs. Times without a zone count as UTC.

    Limits that are far from the waits seen in the log get a suggestion: twice the
    longest wait that was not called hanging.

    Exit code 0: nothing fired, 1: something did, 2: bad input. With [bold]--expect[/]
    0: exactly the expected fired, 1: something else did, or one of them did not.

    Examples: [cyan]chaoskit rules test job.yaml healthy.log[/],
    [cyan]chaoskit rules test job.yaml hung.log --tail-s 600 --expect JobHangingDetection:hanging[/]
    """
    known = read_rules(rules)
    wanted = _expected(expect or [], {rule.name for rule in known})
    found = replay_log(known, log, period_s=period_s, tail_s=tail_s)
    fired = {(one.rule, one.verdict.value) for replayed in found for one in replayed.alarms}
    ok = fired == wanted
    if machine:
        expected = [{"rule": name, "verdict": verdict} for name, verdict in sorted(wanted)]
        print_json({"ok": ok, "expected": expected, "rules": [plain(one) for one in found]})
        return 0 if ok else EXIT_FAILED
    shown = console()
    shown.print(render(found))
    for name, verdict in sorted(wanted - fired):
        shown.print(f"expected, and did not fire: {name}: {verdict}", style="red")
    for name, verdict in sorted(fired - wanted) if wanted else ():
        shown.print(f"not expected: {name}: {verdict}", style="red")
    return 0 if ok else EXIT_FAILED


def _expected(given: list[str], names: set[str]) -> set[tuple[str, str]]:
    verdicts = [one.value for one in RuleVerdict if one != RuleVerdict.STOPPED]
    wanted = set()
    for one in given:
        name, _, verdict = one.rpartition(":")
        if name not in names:
            example = closest_name(name, names) or "NAME"
            raise BadInput(
                "expect", one, f"write {example}:VERDICT with one of {', '.join(sorted(names))}"
            )
        if verdict not in verdicts:
            raise BadInput("expect", one, f"write NAME:VERDICT with one of {', '.join(verdicts)}")
        wanted.add((name, verdict))
    return wanted


def plain(found: Replay) -> dict[str, Any]:
    """What one rule made of the log, as plain data. Times in seconds since 1970, or since the start of the log."""
    points = found.points
    return {
        "name": found.rule.name,
        "points": len(points),
        "first_s": points[0].time_s if points else None,
        "last_s": points[-1].time_s if points else None,
        "gap_s": _named(spread(found.gaps_s)),
        "value": _named(spread(found.values)),
        "fired": [msgspec.to_builtins(one) for one in found.fired],
        "warnings": found.warnings,
        "suggestions": [msgspec.to_builtins(one) for one in suggest(found)],
    }


def _named(found: tuple[float, float, float] | None) -> dict[str, float] | None:
    return dict(zip(("min", "median", "max"), found, strict=True)) if found else None


def render(found: list[Replay]) -> RenderableType:
    """Render what the rules made of the log."""
    rule = Column("rule", is_heading=True)
    table = DataTable(
        rule, Column("points", is_number=True), *map(Column, ("first", "last", "gaps, s", "metric"))
    )
    for one in found:
        ends = (
            [show_time(point.time_s) for point in (one.points[0], one.points[-1])]
            if one.points
            else ["", ""]
        )
        table.add_row(
            Text(one.rule.name),
            str(len(one.points)),
            *ends,
            _spread(one.gaps_s),
            _spread(one.values),
        )
    said: list[RenderableType] = [Text("gaps and metrics: least / median / greatest", "dim")]
    everything = sorted(
        (fired for one in found for fired in one.fired), key=lambda fired: fired.time_s
    )
    for fired in everything:
        text = f"{show_time(fired.time_s)}  {fired.rule}: {fired.verdict}, {fired.reason}"
        stopped = fired.verdict == RuleVerdict.STOPPED
        said.append(
            Text(text if stopped else f"{text} -> {fired.action}", "" if stopped else "red")
        )
    if not any(one.alarms for one in found):
        said.append(Text("nothing would have fired", "green"))
    for one in found:
        said += [Text(f"warning: {one.rule.name}: {warning}", "yellow") for warning in one.warnings]
        for hint in suggest(one):
            text = f"hint: {one.rule.name}: {hint.field}={hint.setting_s:g}, and {hint.suggested_s:g} would fit:"
            said.append(Text(f"{text} {hint.reason}", "dim"))
    return Group(table, *said)


def _spread(values: list[float]) -> str:
    found = spread(values)
    return " / ".join(f"{value:.4g}" for value in found) if found else ""
