"""``chaoskit canary``: test the verdicts with planted mistakes, and show which check finds each.

-> cli/testing/test.py starts the suite, whose tests plant the mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from xml.etree import ElementTree as ET

import typer

from chaoskit.cli.output import EXIT_FAILED, Json, command_app, console, print_json
from chaoskit.cli.testing.test import run_suite
from chaoskit.errors import HarnessError
from chaoskit.launcher.launch import fresh_directory
from chaoskit.process.host_checks import require_writable
from chaoskit.vocabulary import EXIT_BAD_INPUT, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

_SUITE = "canary"
_REPORT = "canary.xml"

app = command_app()


class CanaryResult(NamedTuple):
    """The result of one test of the suite.

    Attributes:
        what: the mistake or change that was tried.
        cell: the kind of run in which it was tried.
        check: the check that found it; for a known limit, why no check can.
        verdict: the verdict of the run.
        kind: ``mistake``; ``limit``, a mistake that is known to pass; or ``harmless``, a change
            after which a run must pass.
    """

    what: str
    cell: str
    check: str
    verdict: str
    kind: str

    @property
    def is_wrong(self) -> bool:
        """True if the verdict is wrong: a mistake has passed, or a harmless change has not."""
        return (self.verdict == Verdict.PASSED) == (self.kind == "mistake")


@app.command("canary", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def canary(
    context: typer.Context,
    report: Annotated[
        Path | None, typer.Option(help="Directory for outcomes and journals of the runs.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Test the verdicts with planted mistakes, which must not pass.

    The suite canary makes the runtime lose a gradient, restore another state or skip an update, and
    changes journals as if a fault had struck something else. The table shows which check finds each
    mistake, and with which verdict. Further arguments go to pytest: -k selects mistakes by their
    text or their cell.

    Exit code 0: no mistake passed, 1: a mistake passed, or a harmless change did not, 2: bad input,
    11: error (chaoskit itself failed).

    Example: [cyan]chaoskit canary -k "exact and restore"[/]
    """
    directory = report or fresh_directory(None, _SUITE)
    require_writable("report", directory)
    written = directory / _REPORT
    junit = [
        "-o",
        "junit_family=xunit1",
        f"--junitxml={written}",
    ]  # the other family has no properties of a test
    code = run_suite(
        _SUITE, [f"--chaos-report={directory}", *junit, "-q", *context.args], quiet=is_json
    )
    if code in (EXIT_BAD_INPUT, Verdict.ERROR.exit_code):
        return code
    results = [*read_report(written)]
    code = EXIT_FAILED if code or any(result.is_wrong for result in results) else 0
    if is_json:
        print_json(
            {
                "exit_code": code,
                "directory": str(directory),
                "tried": [result._asdict() for result in results],
            }
        )
    else:
        console().print(render(results))
    return code


def read_report(path: Path) -> Iterator[CanaryResult]:
    """Yield the results that the tests have written into a JUnit file.

    Test cases without a complete result are skipped.

    Raises:
        HarnessError: if there is no such file, or it is damaged.
    """
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise HarnessError(f"the suite {_SUITE} left no report: {error}") from error
    for case in root.iter("testcase"):
        properties = {
            element.get("name", ""): element.get("value", "") for element in case.iter("property")
        }
        fields = [properties.get(f"canary.{name}") for name in CanaryResult._fields]
        if all(field is not None for field in fields):
            yield CanaryResult(*(field or "" for field in fields))


def render(results: Sequence[CanaryResult]) -> RenderableType:
    """Return a table with a row for each mistake, and a line with their numbers.

    A row has the mistake, its cell, the check that found it, and the verdict.
    """
    from rich.console import Group
    from rich.text import Text

    from chaoskit.report.tables import Column, DataTable

    wrong = sum(result.is_wrong for result in results)
    mistakes = sum(result.kind == "mistake" for result in results)
    limits = sum(result.kind == "limit" for result in results)
    harmless = len(results) - mistakes - limits
    summary = f"mistakes: {mistakes}, known limits: {limits}, harmless changes: {harmless}, wrong verdicts: {wrong}"
    mistake = Column("mistake", is_text=True, is_heading=True)
    check = Column("check", is_text=True)
    table = DataTable(mistake, Column("cell", is_text=True), check, Column("verdict"))
    for result in results:
        style = "bold red" if result.is_wrong else "yellow" if result.kind == "limit" else "green"
        table.add_row(*(Text(field) for field in result[:3]), Text(result.verdict, style))
    return Group(table, Text(summary, "dim"))
