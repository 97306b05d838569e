"""``chaoskit accept``: that a series got slower is known, and no failure until a day."""

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
        str, typer.Argument(help="Its name or that of its test, the beginning, or a part.")
    ],
    reason: Annotated[str, typer.Option(help="Why it may be slower.")],
    until: Annotated[
        str, typer.Option(metavar="DATE", help="The last day of it, in UTC, such as 2026-12-31.")
    ],
    number: Annotated[
        str, typer.Option(help="The number that may be worse. Default: each of them.")
    ] = "",
    machine: Json = False,
) -> int:
    """Accept that a series got worse, until a day.

    Comparisons that read this history go on to show it as regressed, with the reason, and do
    not fail for it. After that day they fail again.

    Example: [cyan]chaoskit accept history test_kill --reason "checks sums now" --until 2026-12-31[/]
    """
    try:
        last = date.fromisoformat(until)
    except ValueError:
        raise BadInput("until", until, "give a day, such as 2026-12-31") from None
    if last < datetime.now(UTC).date():
        raise BadInput("until", until, "give a day that is not over")
    if not reason.strip():
        raise BadInput("reason", reason, "say why: it is shown wherever this series is worse")
    parts = [part.strip() for part in number.split("/")]
    if number and (len(parts) > 2 or not all(part in (*KNOWN, OWN_FAILURE) for part in parts)):
        names = (*KNOWN, OWN_FAILURE)
        remedy = f"use one of {', '.join(names)}, or a quotient of two"
        raise BadInput("number", number, name_remedy(number, names, remedy))
    chosen, _ = choose_series(by_series(read_store(store).runs), series)
    record = AcceptedRecord(
        series=chosen,
        metric=" / ".join(parts),
        reason=reason.strip(),
        until=last,
        by=user_at_host(),
    )
    history = RunHistory(store)
    history.add(new_id(), [record])
    history.close()
    if machine:
        print_json(msgspec.to_builtins(record))
    else:
        console().print(f"{chosen} may be worse until {last}: {record.reason}")
    return 0
