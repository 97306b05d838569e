"""``chaoskit cleanup``: remove what killed runs left behind."""

from __future__ import annotations

import dataclasses

import typer

from chaoskit.cli.output import Json, command_app, print_json
from chaoskit.plaintext import echo
from chaoskit.substrate.undo import any_left, describe, sweep

app = command_app()


@app.command()
def cleanup(machine: Json = False) -> None:
    """Remove what killed runs left behind, and touch nothing else.

    It continues processes that were left stopped, ends those left running, and
    removes control groups, containers and temporary directories. A guard beside each run
    does so when the run is killed, and every run when it starts. Where only Python's standard library
    works: [cyan]python -m chaoskit.substrate.undo[/]

    Ends with status 1 where something could not be put back; the next call tries that again.

    Example: [cyan]chaoskit cleanup[/]
    """
    repairs = sweep()
    if machine:
        print_json({"repairs": [dataclasses.asdict(one) for one in repairs]})
    else:
        for repair in repairs:
            echo(describe(repair))
        if not repairs:
            typer.echo("nothing to put back")
    if any_left(repairs):
        raise typer.Exit(1)
