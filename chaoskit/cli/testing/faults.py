"""``chaoskit faults``: what can be broken, by what evidence that is known, and what of it this machine can do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from chaoskit.cli.output import Json, command_app, console, print_json
from chaoskit.faults import Fault
from chaoskit.faults.base import FAMILIES
from chaoskit.faults.describe import (
    catalogue,
    entry,
    find,
    here,
    moments_in_words,
    of_family,
    signature,
    sorted_roles,
)
from chaoskit.faults.kinds import kinds

app = command_app()


def fault_names() -> list[str]:
    """Return the names that a shell completes."""
    return [kind.__name__ for kind in kinds()]


@app.command()
def faults(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One fault, such as Kill: everything about it.", autocompletion=fault_names
        ),
    ] = None,
    machine: Json = False,
) -> None:
    """List what can be broken, and what of it this machine can do.

    With a name: what it does, its parameters, moments and roles, the evidence at
    each level, the real incidents that it stands for, and a line to paste.

    Example: [cyan]chaoskit faults Hang[/]
    """
    kind = find(name) if name is not None else None
    if machine:
        told = catalogue()
        print_json(
            {"faults": [one for one in told if kind is None or one["name"] == kind.__name__]}
        )
    else:
        console().print(render_fault(kind) if kind else render_catalogue())


def render_catalogue() -> RenderableType:
    """All faults by family, with what this machine can do of them."""
    blocks: list[RenderableType] = []
    for family, title in FAMILIES.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="cyan", min_width=16)
        table.add_column()
        for kind in of_family(family):
            found = here(kind)
            text = Text(kind.effect)
            if found["state"] != "yes":
                text.append(f"\nhere {found['state']}: {found['reason']}", "yellow")
            table.add_row(kind.__name__, text)
        blocks += [Text(title, "bold"), Padding(table, (0, 0, 1, 2))]
    whole = sum(here(kind)["state"] == "yes" for kind in kinds())
    says = f"{whole} of {len(kinds())} can be done here in every form. All about one: chaoskit faults Kill"
    return Group(*blocks, Text(says, "dim"))


def render_fault(kind: type[Fault]) -> RenderableType:
    """Everything about one fault."""
    told, found = entry(kind), here(kind)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for level, words in told["evidence"].items():
        table.add_row(level, words)
    for job, said in told["caught"].items():
        table.add_row("caught", f"{job}: {said}")
    stands_for = Text(told["stands_for"])
    for row in kind.counted:
        stands_for.append(f"\n{row}")
    if kind.unlisted:
        stands_for.append(f"\nin neither table: {kind.unlisted}")
    table.add_row("stands for", stands_for)
    for said in moments_in_words(kind):
        table.add_row("moments", said)
    table.add_row("roles", ", ".join(sorted_roles(kind)) or "none")
    table.add_row("undo", told["undo"])
    table.add_row("substrate", ", ".join(told["substrates"]))
    table.add_row("here", ": ".join(filter(None, found.values())))
    parameters = Table.grid(padding=(0, 2, 0, 0))
    parameters.add_column(no_wrap=True, style="cyan")
    parameters.add_column()
    for parameter in told["parameters"]:
        parameters.add_row(signature(parameter), parameter["meaning"])
    return Group(
        Text.assemble((told["name"], "bold"), f"  {told['effect']}"),
        Padding(Text(told["description"]), (0, 0, 1, 2)),
        Padding(table, (0, 0, 1, 2)),
        Padding(parameters, (0, 0, 1, 2)),
        Text(told["example"], "dim"),
    )
