"""``chaoskit nightly``: nights of experiments, and the report on what they have shown."""

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
from chaoskit.nightly.faces import report_html, report_json, report_markdown
from chaoskit.nightly.outcome import night_sentence
from chaoskit.nightly.plan import load
from chaoskit.nightly.report import build_report
from chaoskit.nightly.run import Night
from chaoskit.plaintext import plural, tell_on_stderr

app = command_app("Nights of experiments: run them, and report on what they have shown.")

Plan = Annotated[Path, typer.Argument(help="The plan of the night, in YAML.")]
_FORMATS = {"html": report_html, "md": report_markdown}


@app.command("run")
def run_night(
    plan: Plan,
    preview: Annotated[
        bool, typer.Option("--preview", help="Say which tests would run, and run none.")
    ] = False,
    machine: Json = False,
) -> int:
    """Run a night: doctor, control arm, experiments, a comparison with the last good night, SLAs.

    One night at a time runs in its directory. A night that was killed goes on where it was:
    tests that were over are not run again. What it leaves: a folder with
    journals, report.html, report.md and report.json, and records in the history.

    Exit code 0: nothing is wrong; 1: a run failed, something regressed or an SLA is broken;
    2: bad input, or the guard does not let it begin; 10: something left no evidence or did not run;
    11: it did not run to its end, or left something behind.

    Example: [cyan]chaoskit nightly run nightly.yaml[/]
    """
    read = load(plan)
    night = Night(read, directory=Path.cwd(), beside=plan.resolve().parent, tell=tell_on_stderr)
    if preview:
        _show_preview(night.preview(), read.repeats, machine=machine)
        return 0
    record = night.run()
    if machine:
        print_json(msgspec.to_builtins(record) | {"folder": str(night.folder)})
    else:
        console().print(
            Text(f"{record.name}: {night_sentence(record)}\n{night.folder / 'report.html'}")
        )
    return record.exit_code


def _show_preview(found: Mapping[str, Sequence[str]], repeats: int, *, machine: bool) -> None:
    """Print the tests of each part."""
    if machine:
        print_json({part: list(tests) for part, tests in found.items()})
        return
    for part, tests in found.items():
        title = f"{part}: {plural(len(tests), 'test')}, {plural(repeats, 'run')} each"
        console().print(Text("\n".join([title, *(f"  {one}" for one in tests)])))


@app.command("report")
def report(
    store: Annotated[str, typer.Argument(help="A history with nights: a folder, or a URL.")],
    night: Annotated[
        str,
        typer.Option(
            metavar="NIGHT",
            help="Its day, commit or the beginning of its name. Default: the latest.",
        ),
    ] = "",
    form: Annotated[
        str, typer.Option("--format", help="What is written: html, md or json.")
    ] = "md",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to FILE instead of standard output.")
    ] = None,
    machine: Json = False,
) -> int:
    """Write the report on a night, beside those before it.

    Example: [cyan]chaoskit nightly report s3://bucket/history --format html --output night.html[/]
    """
    if form not in (*_FORMATS, "json"):
        raise BadInput("form", form, "use html, md or json")
    found = build_report(read_store(store), store, night)
    if machine or (form == "json" and output is None):
        print_json(report_json(found))
        return 0
    text = (
        msgspec.json.encode(report_json(found)).decode()
        if form == "json"
        else _FORMATS[form](found)
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
