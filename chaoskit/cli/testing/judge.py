"""``chaoskit judge``: judge a run again from its directory.

-> experiment/directory.py reads the run. experiment/judge/judge.py decides its verdict.
"""

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
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Directory of one run, with plan.json and journal/."
        ),
    ],
    is_json: Json = False,
) -> int:
    """Judge a run again from its directory alone.

    The directory may have been copied from another machine: neither the job nor a cache is used. A
    run whose harness was killed is an error.

    Exit code 0: passed, 1: failed, 10: unknown, 11: error.

    Example: [cyan]chaoskit judge chaoskit-report/runs/003-test-kill[/]
    """
    outcome = judge_directory(directory)
    if is_json:
        print_json(json.loads(encode_outcome(outcome)))
    else:
        console(is_json).print(render_summary([outcome]))
    return outcome.verdict.exit_code
