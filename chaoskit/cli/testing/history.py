"""``chaoskit history``: records of runs over sessions, their series, and what becomes of them."""

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
from chaoskit.history.faces import sparkline
from chaoskit.history.place import Sources, sources_at
from chaoskit.history.record import RECOVERED, RECOVERY, RunRecord, new_id, passed
from chaoskit.history.session import read, records_of
from chaoskit.history.store import RunContents, RunHistory, encode, read_file
from chaoskit.plaintext import plural, printable, tell_on_stderr
from chaoskit.report.store import read_outcomes
from chaoskit.report.summary import VERDICT_STYLES, duration, number
from chaoskit.report.tables import Column, DataTable
from chaoskit.vocabulary import Verdict

app = command_app("Records of runs over many sessions: what there is, and how it went.")

Store = Annotated[
    str,
    typer.Argument(help="A folder, a URL such as s3://bucket/history, or a file of --chaos-save."),
]
_SHOWN = 40
_FORMATS = ("jsonl", "csv")
_COLUMNS = ("run_id", "session", "series", "title", "machine", "commit", "seed", "verdict")


@app.command("add")
def add(
    store: Store,
    sources: Annotated[
        list[Path], typer.Argument(help="Directories of reports, or files of --chaos-save.")
    ],
    machine: Json = False,
) -> int:
    """Add runs that were made without a history: those of a report, or of a file.

    A run that is there already is added again, and counts once if it has its name.

    Example: [cyan]chaoskit history add history chaoskit-runs/nightly[/]
    """
    added = 0
    history = RunHistory(store)
    for source in sources:
        if source.is_dir():
            there = Sources(
                root=sources_at(Path.cwd()).root
            )  # of which commit it was is not known any more
            pairs = [records_of(outcome, there) for outcome in read_outcomes(source)]
            contents = RunContents(
                [run for run, _ in pairs], {shared.series: shared for _, shared in pairs}
            )
        else:
            contents = read_file(source)
        session = new_id()
        runs = [
            msgspec.structs.replace(run, session=run.session or session) for run in contents.runs
        ]
        history.add(session, [*contents.plans.values(), *runs])
        added += len(runs)
        _tell_set_aside(contents)
    history.close()
    if machine:
        print_json({"added": added})
    else:
        console().print(f"{plural(added, 'run')} added to {store}")
    return 0


@app.command("list")
def list_series(store: Store, machine: Json = False) -> int:
    """The series of runs that there are: one for each experiment, whatever its seed.

    The bars are the medians of its recoveries, session by session.

    Example: [cyan]chaoskit history list history[/]
    """
    contents = read_store(store)
    series = by_series(contents.runs)
    if machine:
        print_json([_plain_series(key, runs) for key, runs in series.items()])
        return 0
    test = Column("test", is_text=True, is_heading=True)
    counts = [Column(name, is_number=True) for name in ("runs", "recovered", "passed", "recovery")]
    table = DataTable(Column("series", is_heading=True), test, *counts, Column("by session"))
    for key, runs in series.items():
        medians = _session_medians(runs, RECOVERY)
        latest = duration(medians[-1]) if medians else "–"
        title = Text(printable(runs[-1].title))
        shares = [f"{held} of {known}" for held, known in (_recovered(runs), _passed(runs))]
        table.add_row(
            _series_name(key), title, str(len(runs)), *shares, latest, sparkline(medians[-_SHOWN:])
        )
    console().print(table)
    return 0


@app.command("show")
def show(
    store: Store,
    series: Annotated[
        str, typer.Argument(help="Its name or that of its test, the beginning, or a part.")
    ] = "",
    metric: Annotated[str, typer.Option(help="The number that is drawn.")] = RECOVERY,
    machine: Json = False,
) -> int:
    """The runs of one series, the latest last: each with its name, by which it can be run again.

    Example: [cyan]chaoskit history show history test_kill --metric recovery.restored[/]
    """
    contents = read_store(store)
    found = by_series(contents.runs)
    chosen = choose_series(found, series)
    runs = found[chosen]
    known = sorted({name for run in runs for name in run.metrics})
    if metric not in known and metric != RECOVERY:  # runs that lost nothing have no recovery
        raise BadInput("metric", metric, name_remedy(metric, known))
    if machine:
        print_json(msgspec.to_builtins(runs))
        return 0
    shown = console()
    shown.print(
        Text.assemble(
            (printable(runs[-1].title), "bold"),
            f"  {_series_name(chosen)}, {plural(len(runs), 'run')}",
        )
    )
    if medians := _session_medians(runs, metric):
        shown.print(Text(f"{metric} by session: {sparkline(medians[-_SHOWN:])}"))
    table = DataTable(
        Column("run", is_heading=True),
        Column("started"),
        Column("verdict"),
        Column("seed", is_number=True),
        Column(metric, is_number=True),
        Column("commit"),
        Column("machine", is_text=True),
    )
    for run in runs[-_SHOWN:]:
        value = run.metrics.get(metric)
        number_text = (
            "–"
            if value is None
            else duration(value.value)
            if value.unit == "s"
            else number(value.value)
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
    shown.print(table)
    if len(runs) > _SHOWN:
        shown.print(f"and {len(runs) - _SHOWN} before them")
    return 0


@app.command("export")
def export(
    store: Store,
    form: Annotated[str, typer.Option("--format", help="What is written: jsonl or csv.")] = "jsonl",
) -> int:
    """Write all records to standard output, for other tools: one line a run, or one a number.

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
        of_run = [started, *(getattr(run, name) for name in _COLUMNS)]
        rows.writerows(
            [*of_run, name, metric.value, metric.unit] for name, metric in run.metrics.items()
        )
    sys.stdout.write(written.getvalue())
    return 0


@app.command("prune")
def prune(
    store: Store,
    older_than_days: Annotated[
        int, typer.Option(help="Sessions that began before so many days go.", min=1, max=36500)
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing, and say what would go.")
    ] = False,
    machine: Json = False,
) -> int:
    """Delete the records of old sessions. Nothing is kept of them.

    Example: [cyan]chaoskit history prune history --older-than-days 400 --dry-run[/]
    """
    history = RunHistory(store)
    if not history.is_there():
        raise BadInput("store", store, "name a history")
    names = history.prune(
        (datetime.now(UTC) - timedelta(days=older_than_days)).date(), dry_run=dry_run
    )
    history.close()
    if machine:
        print_json({"deleted": [] if dry_run else names, "found": names})
    else:
        would = "would be deleted" if dry_run else "deleted"
        console().print("\n".join([*names, f"{plural(len(names), 'session')} {would}"]))
    return 0


def read_store(store: str) -> RunContents:
    """The records in a store that was named on the command line. Raises BadInput, which names it so."""
    try:
        contents = read(store)
    except BadInput as error:
        raise BadInput("store", store, error.remedy) from None
    _tell_set_aside(contents)
    return contents


def _tell_set_aside(contents: RunContents) -> None:
    for line in contents.set_aside:
        tell_on_stderr(line)


def _session_medians(runs: Sequence[RunRecord], metric: str) -> list[float]:
    """Of each session with this number, in their order."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if metric in run.metrics:
            values.setdefault(run.session, []).append(run.metrics[metric].value)
    return [median(of_one) for of_one in values.values()]


def choose_series(
    found: Mapping[tuple[str, int], Sequence[RunRecord]], name: str
) -> tuple[str, int]:
    """Return the series that a name means: the series or test called so, else one that begins so or contains it.

    Raises:
        BadInput: if there is none, or more than one.
    """
    names = {key: [_series_name(key), *_test_names(runs[-1].title)] for key, runs in found.items()}
    chosen = (
        [key for key in names if name in names[key][:-1]]
        or [key for key in names if name == names[key][-1]]
        or [key for key in names if any(candidate.startswith(name) for candidate in names[key])]
        or [key for key, runs in found.items() if name in runs[-1].title]
    )
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(f"{_series_name(key)} ({found[key][-1].title})" for key in (chosen or found))
    if chosen:
        raise BadInput("series", name, f"name one of {listed}")
    tests = [_test_names(runs[-1].title)[1] for runs in found.values()]
    raise BadInput("series", name, name_remedy(name, tests, f"name one of {listed}"))


def _test_names(title: str) -> tuple[str, str, str]:
    """Return the names of a test: its title, without its file and class, and without parameters and number, too."""
    place, _, _ = title.partition("[")
    start = place.rfind("::") + len("::") if "::" in place else 0
    name = title[start:]
    return title, name, name.partition("[")[0].partition(" #")[0]


def _series_name(key: tuple[str, int]) -> str:
    """Its digest; with the number of its definition, beyond the first."""
    series, definition = key
    return series if definition == 1 else f"{series}.{definition}"


def _recovered(runs: Sequence[RunRecord]) -> tuple[int, int]:
    """Return how many runs recovered, and of how many that is known."""
    known = [run.metrics[RECOVERED].value for run in runs if RECOVERED in run.metrics]
    return int(sum(known)), len(known)


def _passed(runs: Sequence[RunRecord]) -> tuple[int, int]:
    """Return how many runs passed, with their tests, and how many say anything."""
    known = [passed(run) for run in runs if run.verdict in (Verdict.PASSED, Verdict.FAILED)]
    return sum(known), len(known)


def _result(run: RunRecord) -> Text:
    """Return the verdict of a run; of one that passed, and whose test did not, that the test failed."""
    if run.verdict is Verdict.PASSED and run.test_failed:
        return Text("test failed", VERDICT_STYLES[Verdict.FAILED])
    return Text(run.verdict.value, VERDICT_STYLES[run.verdict])


def _plain_series(key: tuple[str, int], runs: Sequence[RunRecord]) -> dict[str, Any]:
    return {
        "series": _series_name(key),
        "title": runs[-1].title,
        "runs": len(runs),
        "recovered": _recovered(runs)[0],
        "passed": _passed(runs)[0],
        "recovery_s": _session_medians(runs, RECOVERY),
    }
