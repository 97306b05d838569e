"""``chaoskit history``: list, show, export and prune records of runs over sessions.

-> history/store.py: the files. history/record.py: the records. history/session.py: their making.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.errors import BadInput, name_remedy
from chaoskit.history.compare import by_series
from chaoskit.history.place import Sources, sources_at
from chaoskit.history.record import RECOVERED, RECOVERY, RunRecord, new_id, passed
from chaoskit.history.rendering import sparkline
from chaoskit.history.session import read, records_of
from chaoskit.history.store import RunContents, RunHistory, encode, read_file
from chaoskit.plaintext import plural, printable, tell_on_stderr
from chaoskit.report.store import read_outcomes
from chaoskit.report.summary import VERDICT_STYLES, duration, number
from chaoskit.report.tables import Column, DataTable
from chaoskit.vocabulary import Verdict

app = command_app("List, show, export and prune the records of runs over many sessions.")

Store = Annotated[
    str,
    typer.Argument(help="A folder, a URL such as s3://bucket/history, or a file of --chaos-save."),
]
_ROWS_SHOWN = 40
_FORMATS = ("jsonl", "csv")
_COLUMNS = ("run_id", "session", "series", "title", "machine", "commit", "seed", "verdict")


@app.command("add")
def add(
    store: Store,
    sources: Annotated[
        list[Path], typer.Argument(help="Directories of reports, or files of --chaos-save.")
    ],
    is_json: Json = False,
) -> int:
    """Add runs that were made without a history: those of a report, or of a file.

    A run that the history already has is added again, and counts once if it has the same name.

    Example: [cyan]chaoskit history add history chaoskit-runs/nightly[/]
    """
    added = 0
    history = RunHistory(store)
    for source in sources:
        if source.is_dir():
            unknown_sources = Sources(
                root=sources_at(Path.cwd()).root
            )  # the commit of these runs is not known any more
            pairs = [records_of(outcome, unknown_sources) for outcome in read_outcomes(source)]
            contents = RunContents(
                [run for run, _ in pairs],
                {series_record.series: series_record for _, series_record in pairs},
            )
        else:
            contents = read_file(source)
        session = new_id()
        runs = [
            msgspec.structs.replace(run, session=run.session or session) for run in contents.runs
        ]
        history.add(session, [*contents.plans.values(), *runs])
        added += len(runs)
        _report_set_aside(contents)
    history.close()
    if is_json:
        print_json({"added": added})
    else:
        console().print(f"{plural(added, 'run')} added to {store}")
    return 0


@app.command("list")
def list_series(store: Store, is_json: Json = False) -> int:
    """List the series of runs: one for each experiment, whatever its seed.

    The bars are the medians of its recoveries, session by session.

    Example: [cyan]chaoskit history list history[/]
    """
    contents = read_store(store)
    series = by_series(contents.runs)
    if is_json:
        print_json([_plain_series(key, runs) for key, runs in series.items()])
        return 0
    test = Column("test", is_text=True, is_heading=True)
    counts = [Column(name, is_number=True) for name in ("runs", "recovered", "passed", "recovery")]
    table = DataTable(Column("series", is_heading=True), test, *counts, Column("by session"))
    for key, runs in series.items():
        medians = _session_medians(runs, RECOVERY)
        latest = duration(medians[-1]) if medians else "–"
        title = Text(printable(runs[-1].title))
        shares = [
            f"{count} of {total}"
            for count, total in (_recovered_counts(runs), _passed_counts(runs))
        ]
        table.add_row(
            _series_name(key),
            title,
            str(len(runs)),
            *shares,
            latest,
            sparkline(medians[-_ROWS_SHOWN:]),
        )
    console().print(table)
    return 0


@app.command("show")
def show(
    store: Store,
    series: Annotated[
        str,
        typer.Argument(help="Name of the series or of its test, or a unique part of such a name."),
    ] = "",
    metric: Annotated[str, typer.Option(help="Number to show and draw.")] = RECOVERY,
    is_json: Json = False,
) -> int:
    """Show the runs of one series, the latest last, each with its name for replays.

    Example: [cyan]chaoskit history show history test_kill --metric recovery.restored[/]
    """
    contents = read_store(store)
    series_runs = by_series(contents.runs)
    key = choose_series(series_runs, series)
    runs = series_runs[key]
    metrics = sorted({name for run in runs for name in run.metrics})
    if metric not in metrics and metric != RECOVERY:  # runs without a loss have no recovery
        raise BadInput("metric", metric, name_remedy(metric, metrics))
    if is_json:
        print_json(msgspec.to_builtins(runs))
        return 0
    terminal = console()
    terminal.print(
        Text.assemble(
            (printable(runs[-1].title), "bold"),
            f"  {_series_name(key)}, {plural(len(runs), 'run')}",
        )
    )
    if medians := _session_medians(runs, metric):
        terminal.print(Text(f"{metric} by session: {sparkline(medians[-_ROWS_SHOWN:])}"))
    table = DataTable(
        Column("run", is_heading=True),
        Column("started"),
        Column("verdict"),
        Column("seed", is_number=True),
        Column(metric, is_number=True),
        Column("commit"),
        Column("machine", is_text=True),
    )
    for run in runs[-_ROWS_SHOWN:]:
        measured = run.metrics.get(metric)
        number_text = (
            "–"
            if measured is None
            else duration(measured.value)
            if measured.unit == "s"
            else number(measured.value)
        )
        started = f"{datetime.fromtimestamp(run.started_unix_ns / 1e9, UTC):%Y-%m-%d %H:%M}"
        verdict = _result(run)
        table.add_row(
            run.run_id,
            started,
            verdict,
            str(run.seed),
            number_text,
            run.commit[:10],
            Text(run.machine),
        )
    terminal.print(table)
    if len(runs) > _ROWS_SHOWN:
        terminal.print(f"and {len(runs) - _ROWS_SHOWN} earlier runs")
    return 0


@app.command("export")
def export(
    store: Store,
    form: Annotated[str, typer.Option("--format", help="Output format: jsonl or csv.")] = "jsonl",
) -> int:
    """Write all records to standard output for other tools.

    A line is one record or, with --format csv, one number of a run.

    Example: [cyan]chaoskit history export history --format csv > runs.csv[/]
    """
    if form not in _FORMATS:
        raise BadInput("form", form, f"use one of {', '.join(_FORMATS)}")
    contents = read_store(store)
    if form == "jsonl":
        sys.stdout.write(
            encode(
                [*contents.plans.values(), *contents.accepted, *contents.nights, *contents.runs]
            ).decode()
        )
        return 0
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(["started", *_COLUMNS, "metric", "value", "unit"])
    for run in contents.runs:
        started = datetime.fromtimestamp(run.started_unix_ns / 1e9, UTC).isoformat(
            timespec="seconds"
        )
        run_cells = [started, *(getattr(run, name) for name in _COLUMNS)]
        rows.writerows(
            [*run_cells, name, metric.value, metric.unit] for name, metric in run.metrics.items()
        )
    sys.stdout.write(written.getvalue())
    return 0


@app.command("prune")
def prune(
    store: Store,
    older_than_days: Annotated[
        int,
        typer.Option(
            help="Delete sessions that began more than this many days ago.", min=1, max=36500
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the sessions to delete, and delete none.")
    ] = False,
    is_json: Json = False,
) -> int:
    """Delete the records of old sessions for good.

    Example: [cyan]chaoskit history prune history --older-than-days 400 --dry-run[/]
    """
    history = RunHistory(store)
    if not history.is_there():
        raise BadInput("store", store, "name a history")
    names = history.prune(
        (datetime.now(UTC) - timedelta(days=older_than_days)).date(), dry_run=dry_run
    )
    history.close()
    if is_json:
        print_json({"deleted": [] if dry_run else names, "found": names})
    else:
        verb = "would be deleted" if dry_run else "deleted"
        console().print("\n".join([*names, f"{plural(len(names), 'session')} {verb}"]))
    return 0


def read_store(store: str) -> RunContents:
    """Return the records of a store named on the command line.

    Parts that cannot be read are reported on standard error.

    Raises:
        BadInput: if there is no history, a file has no run, or it cannot be read. The field is
            ``store``.
    """
    try:
        contents = read(store)
    except BadInput as error:
        raise BadInput("store", store, error.remedy) from None
    _report_set_aside(contents)
    return contents


def _report_set_aside(contents: RunContents) -> None:
    """Print a line on standard error for each part that could not be read."""
    for line in contents.set_aside:
        tell_on_stderr(line)


def _session_medians(runs: Sequence[RunRecord], metric: str) -> list[float]:
    """Return the median of a number in each session that has it, in the order of first runs."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if metric in run.metrics:
            values.setdefault(run.session, []).append(run.metrics[metric].value)
    return [median(session_values) for session_values in values.values()]


def choose_series(
    series_runs: Mapping[tuple[str, int], Sequence[RunRecord]], name: str
) -> tuple[str, int]:
    """Return the series that a name selects.

    It is the series or test of this name, or else the only one that begins so or contains it.

    Raises:
        BadInput: if no series or several match.
    """
    names = {
        key: [_series_name(key), *_test_names(runs[-1].title)] for key, runs in series_runs.items()
    }
    matching = (
        [key for key in names if name in names[key][:-1]]
        or [key for key in names if name == names[key][-1]]
        or [key for key in names if any(candidate.startswith(name) for candidate in names[key])]
        or [key for key, runs in series_runs.items() if name in runs[-1].title]
    )
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(
        f"{_series_name(key)} ({series_runs[key][-1].title})" for key in (matching or series_runs)
    )
    if matching:
        raise BadInput("series", name, f"name one of {listed}")
    tests = [_test_names(runs[-1].title)[1] for runs in series_runs.values()]
    raise BadInput("series", name, name_remedy(name, tests, f"name one of {listed}"))


def _test_names(title: str) -> tuple[str, str, str]:
    """Return the names of a test.

    They are its title, the title without file and class, and the same without parameters and
    number.
    """
    path, _, _ = title.partition("[")
    start = path.rfind("::") + len("::") if "::" in path else 0
    name = title[start:]
    return title, name, name.partition("[")[0].partition(" #")[0]


def _series_name(key: tuple[str, int]) -> str:
    """Return the digest of a series, with the number of its definition beyond the first."""
    series, definition = key
    return series if definition == 1 else f"{series}.{definition}"


def _recovered_counts(runs: Sequence[RunRecord]) -> tuple[int, int]:
    """Return the number of runs that recovered, and the number of runs for which that is known."""
    recovered = [run.metrics[RECOVERED].value for run in runs if RECOVERED in run.metrics]
    return int(sum(recovered)), len(recovered)


def _passed_counts(runs: Sequence[RunRecord]) -> tuple[int, int]:
    """Return the number of runs that passed with their tests, and the number of conclusive runs."""
    results = [passed(run) for run in runs if run.verdict in (Verdict.PASSED, Verdict.FAILED)]
    return sum(results), len(results)


def _result(run: RunRecord) -> Text:
    """Return the verdict of a run, or "test failed" if the run passed and its test did not."""
    if run.verdict is Verdict.PASSED and run.test_failed:
        return Text("test failed", VERDICT_STYLES[Verdict.FAILED])
    return Text(run.verdict.value, VERDICT_STYLES[run.verdict])


def _plain_series(key: tuple[str, int], runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return a series as JSON values."""
    return {
        "series": _series_name(key),
        "title": runs[-1].title,
        "runs": len(runs),
        "recovered": _recovered_counts(runs)[0],
        "passed": _passed_counts(runs)[0],
        "recovery_s": _session_medians(runs, RECOVERY),
    }
