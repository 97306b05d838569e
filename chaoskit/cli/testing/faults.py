"""``chaoskit faults``: list faults, their evidence, and those that this machine supports.

-> faults/describe.py: the data about each fault, and its support here.
"""

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
    """Return the names of faults for completion in a shell."""
    return [kind.__name__ for kind in kinds()]


@app.command()
def faults(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Fault to describe in detail, such as Kill. Default: list all faults.",
            autocompletion=fault_names,
        ),
    ] = None,
    is_json: Json = False,
) -> None:
    """List the faults that can be injected, and those that this machine supports.

    The description of a single fault has its effect, its parameters, moments and roles, the
    evidence at each level, the real incidents that it stands for, and an example to paste.

    Example: [cyan]chaoskit faults Hang[/]
    """
    kind = find(name) if name is not None else None
    if is_json:
        entries = catalogue()
        print_json(
            {
                "faults": [
                    fault for fault in entries if kind is None or fault["name"] == kind.__name__
                ]
            }
        )
    else:
        console().print(render_fault(kind) if kind else render_catalogue())


def render_catalogue() -> RenderableType:
    """Return all faults by family, each with the reason if this machine cannot inject it."""
    blocks: list[RenderableType] = []
    for family, title in FAMILIES.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="cyan", min_width=16)
        table.add_column()
        for kind in of_family(family):
            support = here(kind)
            text = Text(kind.effect)
            if support["state"] != "yes":
                text.append(f"\nhere {support['state']}: {support['reason']}", "yellow")
            table.add_row(kind.__name__, text)
        blocks += [Text(title, "bold"), Padding(table, (0, 0, 1, 2))]
    supported = sum(here(kind)["state"] == "yes" for kind in kinds())
    summary = f"{supported} of {len(kinds())} can be injected here in every form."
    return Group(*blocks, Text(f"{summary} Details of a fault: chaoskit faults Kill", "dim"))


def render_fault(kind: type[Fault]) -> RenderableType:
    """Return a full description of one fault."""
    description, support = entry(kind), here(kind)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim", min_width=10)
    table.add_column()
    for level, words in description["evidence"].items():
        table.add_row(level, words)
    for job, check in description["caught"].items():
        table.add_row("caught", f"{job}: {check}")
    stands_for = Text(description["stands_for"])
    for row in kind.counted:
        stands_for.append(f"\n{row}")
    if kind.unlisted:
        stands_for.append(f"\nin neither table: {kind.unlisted}")
    table.add_row("stands for", stands_for)
    for check in moments_in_words(kind):
        table.add_row("moments", check)
    table.add_row("roles", ", ".join(sorted_roles(kind)) or "none")
    table.add_row("undo", description["undo"])
    table.add_row("substrate", ", ".join(description["substrates"]))
    table.add_row("here", ": ".join(filter(None, support.values())))
    parameters = Table.grid(padding=(0, 2, 0, 0))
    parameters.add_column(no_wrap=True, style="cyan")
    parameters.add_column()
    for parameter in description["parameters"]:
        parameters.add_row(signature(parameter), parameter["meaning"])
    return Group(
        Text.assemble((description["name"], "bold"), f"  {description['effect']}"),
        Padding(Text(description["description"]), (0, 0, 1, 2)),
        Padding(table, (0, 0, 1, 2)),
        Padding(parameters, (0, 0, 1, 2)),
        Text(description["example"], "dim"),
    )
