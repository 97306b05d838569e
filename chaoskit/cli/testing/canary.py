"""``chaoskit canary``: try the verdicts themselves with mistakes, and show which check finds each of them."""

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


class Tried(NamedTuple):
    """What one test of the suite has tried.

    Attributes:
        check: that found it; of a known limit, why none does.
        kind: ``mistake``; ``limit``, which is known to pass; ``harmless``, a change after which a run must pass.
    """

    what: str
    cell: str
    check: str
    verdict: str
    kind: str

    @property
    def is_wrong(self) -> bool:
        """Whether the verdict is: a mistake has passed, or something harmless has not."""
        return (self.verdict == Verdict.PASSED) == (self.kind == "mistake")


@app.command("canary", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def canary(
    context: typer.Context,
    report: Annotated[
        Path | None, typer.Option(help="Directory for outcomes and journals of the runs.")
    ] = None,
    machine: Json = False,
) -> int:
    """Try the verdicts themselves: mistakes that must not pass.

    Runs the suite canary: the runtime is made to lose a gradient, to restore another state
    or to skip an update, and journals are changed as if a fault had struck something else.
    The table shows for each mistake which check finds it, and with which verdict. Further
    arguments go to pytest: -k picks mistakes by what they do or by their cell.

    Exit code 0: no mistake passed, 1: one did, or a harmless change did not, 2: bad input,
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
        _SUITE, [f"--chaos-report={directory}", *junit, "-q", *context.args], quiet=machine
    )
    if code in (EXIT_BAD_INPUT, Verdict.ERROR.exit_code):
        return code
    tried = [*read_report(written)]
    code = EXIT_FAILED if code or any(one.is_wrong for one in tried) else 0
    if machine:
        print_json(
            {
                "exit_code": code,
                "directory": str(directory),
                "tried": [one._asdict() for one in tried],
            }
        )
    else:
        console().print(render(tried))
    return code


def read_report(path: Path) -> Iterator[Tried]:
    """What the tests in a JUnit file say that they have tried.

    Raises:
        HarnessError: if there is no such file, or it is damaged.
    """
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as error:
        raise HarnessError(f"the suite {_SUITE} left no report: {error}") from error
    for case in root.iter("testcase"):
        told = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        fields = [told.get(f"canary.{name}") for name in Tried._fields]
        if all(field is not None for field in fields):
            yield Tried(*(field or "" for field in fields))


def render(tried: Sequence[Tried]) -> RenderableType:
    """Return a table with a row for each mistake: its cell, the check that found it, and the verdict."""
    from rich.console import Group
    from rich.text import Text

    from chaoskit.report.tables import Column, DataTable

    wrong = sum(one.is_wrong for one in tried)
    mistakes = sum(one.kind == "mistake" for one in tried)
    limits = sum(one.kind == "limit" for one in tried)
    harmless = len(tried) - mistakes - limits
    says = f"mistakes: {mistakes}, known limits: {limits}, harmless changes: {harmless}, wrong verdicts: {wrong}"
    mistake = Column("mistake", is_text=True, is_heading=True)
    check = Column("check", is_text=True)
    table = DataTable(mistake, Column("cell", is_text=True), check, Column("verdict"))
    for one in tried:
        style = "bold red" if one.is_wrong else "yellow" if one.kind == "limit" else "green"
        table.add_row(*(Text(field) for field in one[:3]), Text(one.verdict, style))
    return Group(table, Text(says, "dim"))
