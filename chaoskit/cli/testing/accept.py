"""``chaoskit accept``: accept that a series got worse, until a day.

-> history/compare.py: ``with_accepted``, by which such a regression is no failure.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Annotated

import msgspec
import typer

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.cli.testing.history import choose_series, read_store
from chaoskit.errors import BadInput, name_remedy
from chaoskit.history.compare import by_series
from chaoskit.history.record import KNOWN, AcceptedRecord, new_id
from chaoskit.history.store import RunHistory
from chaoskit.process.linux import user_at_host
from chaoskit.versions.schedule import OWN_FAILURE

app = command_app()


@app.command("accept")
def accept(
    store: Annotated[
        str, typer.Argument(help="A history: a folder, or a URL such as s3://bucket/history.")
    ],
    series: Annotated[
        str,
        typer.Argument(help="Name of the series or of its test, or a unique part of such a name."),
    ],
    reason: Annotated[str, typer.Option(help="Reason why the series may be worse.")],
    until: Annotated[
        str,
        typer.Option(
            metavar="DATE", help="Last day of the acceptance, in UTC, such as 2026-12-31."
        ),
    ],
    number: Annotated[
        str, typer.Option(help="Number that may be worse, such as recovery. Default: all numbers.")
    ] = "",
    is_json: Json = False,
) -> int:
    """Accept that a series got worse, until a day.

    Comparisons that read this history still show it as regressed, with the reason, but do not fail
    for it. After that day they fail again.

    Example: [cyan]chaoskit accept history test_kill --reason "checks sums now" --until
    2026-12-31[/]
    """
    try:
        last = date.fromisoformat(until)
    except ValueError:
        raise BadInput("until", until, "give a day, such as 2026-12-31") from None
    if last < datetime.now(UTC).date():
        raise BadInput("until", until, "give today or a later day")
    if not reason.strip():
        raise BadInput("reason", reason, "give a reason: reports show it beside the worse number")
    parts = [part.strip() for part in number.split("/")]
    if number and (len(parts) > 2 or not all(part in (*KNOWN, OWN_FAILURE) for part in parts)):
        names = (*KNOWN, OWN_FAILURE)
        remedy = f"use one of {', '.join(names)}, or a quotient of two"
        raise BadInput("number", number, name_remedy(number, names, remedy))
    series_digest, _ = choose_series(by_series(read_store(store).runs), series)
    record = AcceptedRecord(
        series=series_digest,
        metric=" / ".join(parts),
        reason=reason.strip(),
        until=last,
        by=user_at_host(),
    )
    history = RunHistory(store)
    history.add(new_id(), [record])
    history.close()
    if is_json:
        print_json(msgspec.to_builtins(record))
    else:
        console().print(f"{series_digest} may be worse until {last}: {record.reason}")
    return 0
