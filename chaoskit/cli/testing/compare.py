"""``chaoskit compare``: run two versions of a project in turns, or compare two sets of records.

-> versions/run.py: versions in turns. history/compare.py: records, and the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from chaoskit.cli.output import Json, add_summary, command_app, console, print_json
from chaoskit.cli.testing.history import read_store
from chaoskit.errors import BadInput
from chaoskit.history.compare import TOLERANCE, RunComparison, compare, exit_code, with_accepted
from chaoskit.history.record import HistoryRecord, RunRecord, new_id
from chaoskit.history.rendering import comparison_sentence, markdown, render_comparison, top_changes
from chaoskit.history.store import RunContents, RunHistory
from chaoskit.plaintext import tell_on_stderr
from chaoskit.process.host_checks import require_writable
from chaoskit.versions.budget import seconds_of
from chaoskit.versions.looks import NUMBERS, require_numbers
from chaoskit.versions.looks import TOLERANCE as TOLERANCE_IN_TURNS
from chaoskit.versions.rendering import ProgressLines, result_sentence
from chaoskit.versions.run import VersionRequest, compare_versions
from chaoskit.versions.trees import LAST_GOOD

app = command_app()


@app.command("compare", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def compare_command(
    context: typer.Context,
    before: Annotated[
        str,
        typer.Argument(
            help="Earlier version: a commit, merge-base or env:PATH. Or a store or file of records."
        ),
    ],
    after: Annotated[
        str, typer.Argument(help="Later version, likewise; '.' stands for the present files.")
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="End after this time, such as 10m. Numbers that are open then are undecided.",
        ),
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Growth of a duration that counts as worse. Default: 0.1; for records 0.25.",
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        list[str] | None,
        typer.Option(
            help="Number to compare in turns; repeatable.",
            show_default=", ".join(NUMBERS),
        ),
    ] = None,
    history: Annotated[
        str,
        typer.Option(metavar="STORE", help="Add the runs of the later version to this history."),
    ] = "",
    prepare: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Command to run in the checkout of each version first, such as 'make ext'.",
        ),
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 10 if any number is not decided.")
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the result to FILE, as Markdown.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Compare two versions, and show the numbers that got worse.

    Versions run in turns: each is checked out in a directory of its own. Their chaos tests run once
    in one version and once in the other, until it is known which is slower. Further arguments go to
    pytest, so name tests there. Seconds can be compared, because the machine is the same at the
    same time. Regressions are run again in a second session before they are reported.

    Records are compared without new runs. Name a STORE, a FILE, or STORE@COMMIT for the records of
    one commit or session.

    Exit code 0: no number got worse; 1: a number got worse; 2: bad input; 10: no number could be
    compared or, with [bold]--strict[/], some number was not decided.

    Example: [cyan]chaoskit compare merge-base . tests/chaos --budget 10m[/]
    """
    if tolerance is not None and not 0 < tolerance < 10:
        raise BadInput("tolerance", tolerance, "use a share above 0, such as 0.1")
    if _is_store(before) or _is_store(after):
        if context.args or budget or number or history or prepare:
            remedy = (
                "name two versions to run tests in turns, or two stores of records; "
                "tests and options of runs apply to versions only"
            )
            raise BadInput("after", after, remedy)
        earlier, later = _records(before, "before"), _records(after, "after")
        comparison, seconds = compare(earlier.runs, later.runs, tolerance or TOLERANCE), None
        accepted = [*earlier.accepted, *later.accepted]
    else:
        contents = _read_history(history)
        request = VersionRequest(
            _last_good(contents) if before == LAST_GOOD else before,
            after,
            tuple(context.args),
            numbers=require_numbers(number or (), "number"),
            tolerance=tolerance or TOLERANCE_IN_TURNS,
            budget_s=seconds_of(budget, "budget") if budget else None,
            prepare=prepare,
        )
        if summary is not None:
            require_writable("summary", summary.parent)
        result = compare_versions(request, ProgressLines(tell_on_stderr))
        comparison, seconds, accepted = result.comparison, result.seconds, contents.accepted
    comparison = with_accepted(comparison, accepted, datetime.now(UTC).date())
    _print_comparison(comparison, seconds, is_json)
    if seconds is not None and history:
        _store_records(RunHistory(history), result.records)
    if summary is not None:
        add_summary(summary, markdown(comparison, f"{before} and {after}"))
    return exit_code(comparison, is_strict=strict)


def _last_good(contents: RunContents) -> str:
    """Return the commit of the last good night. Raise BadInput if the history has none."""
    if commit := contents.last_good():
        return commit
    raise BadInput(
        "before", LAST_GOOD, "name a --history that has a night with exit code 0, or a commit"
    )


def _read_history(history: str) -> RunContents:
    """Return the contents of a history; empty without a name or before the history exists."""
    if not history:
        return RunContents()
    with closing(RunHistory(history)) as store:
        return store.read() if store.is_there() else RunContents()


def _store_records(store: RunHistory, records: Sequence[HistoryRecord]) -> None:
    """Add the records to a history as a new session, and close the history."""
    session = new_id()
    session_records = [
        msgspec.structs.replace(record, session=session)
        if isinstance(record, RunRecord)
        else record
        for record in records
    ]
    with closing(store):
        store.add(session, session_records)


def _print_comparison(comparison: RunComparison, seconds: float | None, is_json: bool) -> None:
    """Print a comparison as a table, or as JSON.

    Args:
        seconds: the duration of runs in turns; None for records.
    """
    if is_json:
        document: dict[str, Any] = {
            "findings": msgspec.to_builtins(comparison.findings),
            "absent": comparison.absent,
        }
        print_json(document | ({} if seconds is None else {"seconds": round(seconds, 1)}))
        return
    terminal = console()
    if top_changes(comparison):
        terminal.print(render_comparison(comparison))
    duration = "" if seconds is None else f"; {result_sentence(comparison, seconds)}"
    terminal.print(Text(f"{comparison_sentence(comparison)}{duration}"))


def _is_store(name: str) -> bool:
    """Return True if a name is that of a file, a URL or a history of records, with ``@`` or not."""
    store = name.rpartition("@")[0] or name
    return "://" in name or any(
        Path(path).is_file() or (Path(path) / "format.json").is_file() for path in (name, store)
    )


def _records(name: str, field: str) -> RunContents:
    """Return the records of a file or a history. STORE@NAME selects those of a commit or session.

    Args:
        field: the argument that names the place, for errors.

    Raises:
        BadInput: if the place has no such records.
    """
    if not _is_store(name):
        raise BadInput(
            field, name, "name a file of --chaos-save or a history, as the other argument does"
        )
    store, mark, selector = name.rpartition("@")
    if not mark or Path(name).exists():
        return read_store(name)
    contents = read_store(store)
    contents.runs = [
        run
        for run in contents.runs
        if run.commit.startswith(selector) or run.session.startswith(selector)
    ]
    if not selector or not contents.runs:
        raise BadInput(field, name, f"name a commit or a session of which {store} has runs")
    return contents
