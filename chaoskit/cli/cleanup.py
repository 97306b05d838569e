"""``chaoskit cleanup``: remove what killed runs left behind."""

from __future__ import annotations

import typer

from chaoskit.cli.output import Json, command_app, print_json
from chaoskit.substrate.undo import describe, sweep

app = command_app()


@app.command()
def cleanup(machine: Json = False) -> None:
    """Remove what killed runs left behind, and touch nothing else.

    It continues processes that were left stopped, ends those left running, and
    removes control groups and containers. Every run does so when it starts. Where only Python's standard library
    works: [cyan]python -m chaoskit.substrate.undo[/]

    Example: [cyan]chaoskit cleanup[/]
    """
    repairs = sweep()
    if machine:
        found = [{"act": one.act, "target": one.target, "repaired": one.repaired} for one in repairs]
        print_json({"repairs": found})
        return
    for repair in repairs:
        typer.echo(describe(repair))
    if not repairs:
        typer.echo("nothing to put back")
