"""``chaoskit nightly``: run nights of experiments, and report on them.

-> nightly/run.py: the night. nightly/outcome.py: its exit code. nightly/report.py: its report.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.cli.testing.history import read_store
from chaoskit.errors import BadInput
from chaoskit.nightly.outcome import night_sentence
from chaoskit.nightly.plan import load
from chaoskit.nightly.rendering import report_html, report_json, report_markdown
from chaoskit.nightly.report import build_report
from chaoskit.nightly.run import Night
from chaoskit.plaintext import plural, tell_on_stderr

app = command_app("Run nights of experiments, and report on their results.")

Plan = Annotated[Path, typer.Argument(help="The plan of the night, in YAML.")]
_FORMATS = {"html": report_html, "md": report_markdown}


@app.command("run")
def run_night(
    plan: Plan,
    preview: Annotated[
        bool, typer.Option("--preview", help="List the tests of the night, and run none.")
    ] = False,
    is_json: Json = False,
) -> int:
    """Run a night: doctor, control arm, experiments, a comparison with the last good night, SLAs.

    Only one night runs in its directory at a time. A night that was killed is resumed: tests that
    were complete are not run again. A night leaves a folder with journals, report.html, report.md
    and report.json, and records in the history.

    Exit code 0: nothing is wrong; 1: a run or a test failed, a number regressed or an SLA is
    broken; 2: bad input, or the guard forbids the night; 10: evidence is missing, or a planned part
    did not run; 11: the night did not run to its end, or left resources behind.

    Example: [cyan]chaoskit nightly run nightly.yaml[/]
    """
    night_plan = load(plan)
    night = Night(
        night_plan, directory=Path.cwd(), plan_directory=plan.resolve().parent, tell=tell_on_stderr
    )
    if preview:
        _show_preview(night.preview(), night_plan.repeats, is_json=is_json)
        return 0
    record = night.run()
    if is_json:
        print_json(msgspec.to_builtins(record) | {"folder": str(night.folder)})
    else:
        console().print(
            Text(f"{record.name}: {night_sentence(record)}\n{night.folder / 'report.html'}")
        )
    return record.exit_code


def _show_preview(
    tests_by_part: Mapping[str, Sequence[str]], repeats: int, *, is_json: bool
) -> None:
    """Print the tests of each part."""
    if is_json:
        print_json({part: list(tests) for part, tests in tests_by_part.items()})
        return
    for part, tests in tests_by_part.items():
        title = f"{part}: {plural(len(tests), 'test')}, {plural(repeats, 'run')} each"
        console().print(Text("\n".join([title, *(f"  {test}" for test in tests)])))


@app.command("report")
def report(
    store: Annotated[str, typer.Argument(help="A history with nights: a folder, or a URL.")],
    night: Annotated[
        str,
        typer.Option(
            metavar="NIGHT",
            help="Day, commit, UUID or name of the night, or the beginning of commit or UUID. "
            "Default: the latest night.",
        ),
    ] = "",
    form: Annotated[str, typer.Option("--format", help="Output format: html, md or json.")] = "md",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to FILE instead of standard output.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Write the report on a night, compared with the nights before.

    Example: [cyan]chaoskit nightly report s3://bucket/history --format html --output night.html[/]
    """
    if form not in (*_FORMATS, "json"):
        raise BadInput("form", form, "use html, md or json")
    night_report = build_report(read_store(store), store, night)
    if is_json or (form == "json" and output is None):
        print_json(report_json(night_report))
        return 0
    text = (
        msgspec.json.encode(report_json(night_report)).decode()
        if form == "json"
        else _FORMATS[form](night_report)
    )
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(
            "output", str(output), f"name a file that can be written ({error.strerror})"
        ) from None
    return 0
