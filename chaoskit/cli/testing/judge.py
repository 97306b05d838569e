"""``chaoskit judge``: judge a run again, from its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.experiment.directory import judge_directory
from chaoskit.report.store import encode_outcome
from chaoskit.report.summary import render_summary

app = command_app()


@app.command()
def judge(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Of one run: it holds plan.json and journal/.")
    ],
    machine: Json = False,
) -> int:
    """Judge a run again, by what its directory holds and nothing else.

    The directory may have been copied from another machine: neither the job nor a cache is
    asked for. A run whose harness was killed is an error.

    Exit code 0: passed, 1: failed, 10: unknown, 11: error.

    Example: [cyan]chaoskit judge chaoskit-report/runs/003-test-kill[/]
    """
    outcome = judge_directory(directory)
    if machine:
        print_json(json.loads(encode_outcome(outcome)))
    else:
        console(machine).print(render_summary([outcome]))
    return outcome.verdict.exit_code
