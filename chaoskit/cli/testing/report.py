"""``chaoskit report``: summarize stored outcomes.

-> report/store.py: the outcomes. report/summary.py: the summary.
-> report/html.py and report/junit.py: the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.errors import BadInput
from chaoskit.process.host_checks import require_writable
from chaoskit.report.html import write_html
from chaoskit.report.junit import write_junit
from chaoskit.report.statistics import estimate_recovery
from chaoskit.report.store import encode_outcome, read_outcomes
from chaoskit.report.summary import render_summary
from chaoskit.vocabulary import Verdict

app = command_app()


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="Directory with an outcome.json at any depth.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An HTML page to write.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JUnit XML file to write.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Let the worst result set the exit code.")
    ] = False,
    is_json: Json = False,
) -> int:
    """Summarize the outcomes below a directory; optionally write HTML or JUnit.

    Exit code 0: done. With [bold]--check[/] 0: all passed, 1: failed, 10: unknown, 11: error. The
    worst result counts, and a test that failed after its run is failed.

    Example: [cyan]chaoskit report chaoskit-demo --html page.html --junit junit.xml[/]
    """
    outcomes = read_outcomes(directory)
    for field, file in (("html", html), ("junit", junit)):
        _require_file(field, file)
    if html is not None:
        write_html(outcomes, html)
    if junit is not None:
        write_junit(outcomes, junit)
    verdict = Verdict.worst([outcome.result for outcome in outcomes])
    if is_json:
        plain = [json.loads(encode_outcome(outcome)) for outcome in outcomes]
        recovery = estimate_recovery(outcomes).plain()
        accounts = [outcome.account.plain() if outcome.account else None for outcome in outcomes]
        document = {"verdict": verdict, "recovery": recovery, "accounts": accounts}
        print_json(document | {"outcomes": plain})
    else:
        console(is_json).print(render_summary(outcomes))
    return verdict.exit_code if check else 0


def _require_file(field: str, path: Path | None) -> None:
    """Raise BadInput if the file of an option cannot be written; None is accepted."""
    if path is not None and path.is_dir():
        example = path / ("page.html" if field == "html" else "junit.xml")
        raise BadInput(field, str(path), f"name a file, such as {example}")
    if path is not None:
        require_writable(field, path.parent)
