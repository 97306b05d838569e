"""``chaoskit cleanup``: remove leftovers of killed runs.

-> substrate/undo/janitor.py: the leftovers, and what undoes them.
"""

from __future__ import annotations

import dataclasses

import typer

from chaoskit.cli.output import Json, command_app, print_json
from chaoskit.plaintext import echo
from chaoskit.substrate.undo import any_left, describe, sweep

app = command_app()


@app.command()
def cleanup(is_json: Json = False) -> None:
    """Remove leftovers of killed runs, and change nothing else.

    The command continues processes that were left stopped, ends those that were left running, and
    removes control groups, containers and temporary directories. A guard beside each run does the
    same when the run is killed, and every run does it at its start. Use [cyan]python -m
    chaoskit.substrate.undo[/] if only Python's standard library works.

    Exit code 0: nothing is left, 1: a leftover could not be removed; the next call tries again.

    Example: [cyan]chaoskit cleanup[/]
    """
    repairs = sweep()
    if is_json:
        print_json({"repairs": [dataclasses.asdict(repair) for repair in repairs]})
    else:
        for repair in repairs:
            echo(describe(repair))
        if not repairs:
            typer.echo("no leftovers")
    if any_left(repairs):
        raise typer.Exit(1)
