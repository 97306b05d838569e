"""``chaoskit sla``: check promises about recoveries against records, and export them as alerts.

-> sla/judge.py: met, broken or not shown. sla/promises.py: the file. sla/export.py: the alerts.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from chaoskit.cli.output import EXIT_FAILED, Json, add_summary, command_app, console, print_json
from chaoskit.cli.testing.history import read_store
from chaoskit.errors import BadInput
from chaoskit.history.store import RunContents
from chaoskit.plaintext import plural, tell_on_stderr
from chaoskit.sla.export import prometheus_rules
from chaoskit.sla.judge import Judged, exit_code, judge
from chaoskit.sla.promises import NIGHTS_LEAST, load
from chaoskit.sla.rendering import render_sla, sla_markdown, sla_sentence
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

app = command_app(
    "SLAs of recoveries: check them against records of runs, and turn them into alerts."
)

File = Annotated[Path, typer.Argument(help="A file of SLAs, in YAML or JSON.")]


@app.command("check")
def check(
    file: File,
    store: Annotated[str, typer.Argument(help="A history, or a file of --chaos-save.")],
    against: Annotated[
        str,
        typer.Option(metavar="STORE", help="Store of earlier runs, for lines about regressions."),
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 10 if any line is not shown yet.")
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the result to FILE, as Markdown.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Check for each line if the records prove it, disprove it, or are too few.

    [bold]met[/]: proven, with the confidence of the SLA. [bold]broken[/]: disproven, or a line that
    must always hold was missed once. [bold]not shown[/]: too few runs or nights, with the number
    that is needed. An SLA that selects no run at all is bad input.

    Exit code 0: met, or not shown; 1: broken; 2: bad input; 10: every run in a window is unknown
    or, with [bold]--strict[/], a line is not shown or a record cannot be read.

    Example: [cyan]chaoskit sla check sla.yaml s3://bucket/history[/]
    """
    slas = load(file)
    contents = read_store(store)
    earlier = read_store(against) if against else RunContents()
    set_aside = [*contents.set_aside, *earlier.set_aside]
    now = datetime.now(UTC)
    judged: list[Judged] = []
    refused: list[BadInput] = []
    for sla in slas:
        try:
            judged += judge(
                sla, contents.runs, contents.plans, today=now.date(), before=earlier.runs
            )
        except BadInput as error:  # the other SLAs are judged all the same
            refused.append(error)
    for line in map(str, refused):
        tell_on_stderr(line)
    if is_json:
        document = {
            "checked": now.isoformat(timespec="seconds"),
            "set_aside": set_aside,
            "refused": list(map(str, refused)),
        }
        print_json(document | {"lines": msgspec.to_builtins(judged)})
    else:
        console().print(render_sla(judged))
        console().print(Text(sla_sentence(judged)))
    if summary is not None:
        add_summary(summary, sla_markdown(judged))
    status = exit_code(judged, is_strict=strict)
    if refused and status != EXIT_FAILED:
        return EXIT_BAD_INPUT
    return status or (Verdict.UNKNOWN.exit_code if strict and set_aside else 0)


@app.command("lint")
def lint(file: File, is_json: Json = False) -> int:
    """Check a file of SLAs, and print how many runs each objective needs.

    Objectives that their window can never decide are refused, with both numbers.

    Example: [cyan]chaoskit sla lint sla.yaml[/]
    """
    objectives: list[dict[str, Any]] = []
    for sla in load(file):
        for objective in sla.objectives:
            needs = [sla.needs(objective, misses) for misses in (0, 1, 2)]
            most = sla.window.count if sla.window.unit == "run" else None
            fits = [count for count in needs if most is None or count <= most]
            objectives.append(
                {
                    "sla": sla.name,
                    "line": objective.text,
                    "runs_needed": fits,
                    "window": str(sla.window),
                }
            )
    if is_json:
        print_json(objectives)
        return 0
    terminal = console()
    for row in objectives:
        misses = ("without a miss", "with one miss", "with two misses")
        counts = zip(row["runs_needed"], misses, strict=False)
        needed = ", ".join(f"{count} runs {words}" for count, words in counts)
        terminal.print(
            f"{row['sla']}: {row['line']}: {needed}, over at least {NIGHTS_LEAST} nights"
        )
    terminal.print(f"{file}: {plural(len(objectives), 'objective')}, no errors")
    return 0


@app.command("export")
def export(
    file: File,
    labels: Annotated[
        str,
        typer.Option(
            help='Prometheus matchers that select the training, such as job="pretraining".'
        ),
    ] = "",
) -> int:
    """Write a PrometheusRule with an alert for each line that a metric of launches can express.

    Example: [cyan]chaoskit sla export sla.yaml --labels 'job="pretraining"' | kubectl apply -f -[/]
    """
    rule, left_out = prometheus_rules(load(file), labels)
    sys.stdout.write(msgspec.yaml.encode(rule).decode())
    for line in left_out:
        tell_on_stderr(line)
    return 0
