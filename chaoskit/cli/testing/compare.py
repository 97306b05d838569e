"""``chaoskit compare``: two versions of a project, run in turns; or two sets of records, as they are."""

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
from chaoskit.history.faces import comparison_sentence, markdown, render_comparison, told_first
from chaoskit.history.record import HistoryRecord, RunRecord, new_id
from chaoskit.history.store import RunContents, RunHistory
from chaoskit.plaintext import tell_on_stderr
from chaoskit.process.host_checks import require_writable
from chaoskit.versions.budget import seconds_of
from chaoskit.versions.faces import ProgressLines, result_sentence
from chaoskit.versions.looks import NUMBERS, require_numbers
from chaoskit.versions.looks import TOLERANCE as TOLERANCE_IN_TURNS
from chaoskit.versions.run import VersionRequest, compare_versions
from chaoskit.versions.trees import LAST_GOOD

app = command_app()


@app.command("compare", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def compare_command(
    context: typer.Context,
    before: Annotated[
        str,
        typer.Argument(help="A commit, merge-base, env:PATH; or a file or a history of records."),
    ],
    after: Annotated[str, typer.Argument(help="Likewise; '.' is the files as they are.")],
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="End after this time, such as 10m: what is open then is undecided."
        ),
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How much longer something may take before it counts as worse. In turns 0.1, of records 0.25.",
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        list[str] | None,
        typer.Option(
            help="What is compared in turns. May be given several times.",
            show_default=", ".join(NUMBERS),
        ),
    ] = None,
    history: Annotated[
        str, typer.Option(metavar="STORE", help="Keep records of the runs of the version after.")
    ] = "",
    prepare: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Run in the directory of each version first, such as 'make ext'.",
        ),
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 10 where anything was not decided.")
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the result to FILE, as Markdown.")
    ] = None,
    machine: Json = False,
) -> int:
    """Say what got worse from one version to another.

    Versions run in turns: each is checked out in a directory of its own, and their chaos tests run once in one,
    once in the other, until it is known which is slower. Further arguments go to
    pytest, so name tests there. Seconds can be compared, because the machine is the same
    at the same time. What got worse is run again in a second session before it is called so.

    Records are compared as they are: STORE, FILE, or STORE@COMMIT for those of one commit or session.

    Exit code 0: nothing got worse; 1: something did; 2: bad input; 10: nothing could be compared,
    and with [bold]--strict[/] something was not decided.

    Example: [cyan]chaoskit compare merge-base . tests/chaos --budget 10m[/]
    """
    if tolerance is not None and not 0 < tolerance < 10:
        raise BadInput("tolerance", tolerance, "use a share above 0, such as 0.1")
    if _is_place(before) or _is_place(after):
        if context.args or budget or number or history or prepare:
            told = "name two versions to run tests in turns, or two places with records, and no tests, budget or history"
            raise BadInput("after", after, told)
        early, late = _records(before, "before"), _records(after, "after")
        found, seconds = compare(early.runs, late.runs, tolerance or TOLERANCE), None
        accepted = [*early.accepted, *late.accepted]
    else:
        contents = _contents(history)
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
        found, seconds, accepted = result.comparison, result.seconds, contents.accepted
    found = with_accepted(found, accepted, datetime.now(UTC).date())
    _show(found, seconds, machine)
    if seconds is not None and history:
        _keep(RunHistory(history), result.records)
    if summary is not None:
        add_summary(summary, markdown(found, f"{before} and {after}"))
    return exit_code(found, is_strict=strict)


def _last_good(contents: RunContents) -> str:
    if commit := contents.last_good():
        return commit
    raise BadInput(
        "before", LAST_GOOD, "name a --history with a night in which nothing was wrong, or a commit"
    )


def _contents(history: str) -> RunContents:
    """What a history knows so far; it may be made by this comparison."""
    if not history:
        return RunContents()
    with closing(RunHistory(history)) as store:
        return store.read() if store.is_there() else RunContents()


def _keep(store: RunHistory, records: Sequence[HistoryRecord]) -> None:
    session = new_id()
    kept = [
        msgspec.structs.replace(one, session=session) if isinstance(one, RunRecord) else one
        for one in records
    ]
    with closing(store):
        store.add(session, kept)


def _show(found: RunComparison, seconds: float | None, machine: bool) -> None:
    if machine:
        told: dict[str, Any] = {
            "findings": msgspec.to_builtins(found.findings),
            "absent": found.absent,
        }
        print_json(told | ({} if seconds is None else {"seconds": round(seconds, 1)}))
        return
    shown = console()
    if told_first(found):
        shown.print(render_comparison(found))
    took = "" if seconds is None else f"; {result_sentence(found, seconds)}"
    shown.print(Text(f"{comparison_sentence(found)}{took}"))


def _is_place(name: str) -> bool:
    """Whether a name is that of a file or a history of records."""
    place = name.rpartition("@")[0] or name
    return "://" in name or any(
        Path(one).is_file() or (Path(one) / "format.json").is_file() for one in (name, place)
    )


def _records(name: str, field: str) -> RunContents:
    """The records in a place; of STORE@NAME, those of that commit or session."""
    if not _is_place(name):
        raise BadInput(
            field, name, "name a file of --chaos-save or a history, as for the other one"
        )
    place, mark, chosen = name.rpartition("@")
    if not mark or Path(name).exists():
        return read_store(name)
    contents = read_store(place)
    contents.runs = [
        run
        for run in contents.runs
        if run.commit.startswith(chosen) or run.session.startswith(chosen)
    ]
    if not chosen or not contents.runs:
        raise BadInput(field, name, f"name a commit or a session of which {place} has runs")
    return contents
