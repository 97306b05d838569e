"""``chaoskit quarantine``: the nodes that are kept out, and their release by a person."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chaoskit.faces.ending import print_json
from chaoskit.plaintext import echo

if TYPE_CHECKING:
    from chaoskit.health import Entry, Quarantine

app = typer.Typer(
    help="List the nodes that are kept out, keep another one out, or release one.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
Node = Annotated[str, typer.Argument(help="Its name in the run.")]
Directory = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the list is. Default: the state directory of this user.")
]


def _open(directory: Path | None) -> Quarantine:
    from chaoskit.health import Quarantine
    from chaoskit.substrate.undo import state_directory

    return Quarantine(directory or state_directory())


@app.command("list")
def list_(directory: Directory = None, machine: Json = False) -> None:
    """Show who is kept out, why and since when, and who has yet to prove itself.

    Example: [cyan]chaoskit quarantine list --json[/]
    """
    entries = _open(directory).entries()
    if machine:
        import msgspec

        print_json({"entries": [msgspec.to_builtins(one) for one in entries]})
        return
    for one in entries:
        _show(one)
    if not entries:
        echo("nobody is in quarantine")


@app.command()
def add(
    node: Node,
    reason: Annotated[str, typer.Option(help="Why; whoever releases it must know.")],
    evidence: Annotated[list[str] | None, typer.Option(help="What was seen; repeatable.")] = None,
    directory: Directory = None,
    machine: Json = False,
) -> None:
    """Keep a node out of all runs that are started from here, until it is released.

    Example: [cyan]chaoskit quarantine add node3 --reason "falls off the bus" --evidence "XID 79"[/]
    """
    _tell(_open(directory).add(node, reason, evidence or []), machine)


@app.command()
def release(
    node: Node,
    reason: Annotated[str, typer.Option(help="What was done about it.")],
    directory: Directory = None,
    machine: Json = False,
) -> None:
    """Let a node come back. It is used when it has passed its health check.

    Example: [cyan]chaoskit quarantine release node3 --reason "GPU 2 replaced"[/]
    """
    _tell(_open(directory).release(node, reason), machine)


def _tell(entry: Entry, machine: bool) -> None:
    if machine:
        import msgspec

        print_json(msgspec.to_builtins(entry))
    else:
        _show(entry)


def _show(entry: Entry) -> None:
    echo(f"{entry.node}: {entry.reason} (since {entry.since}, by {entry.by})")
    for line in entry.evidence:
        echo(f"    {line}")
    if entry.on_probation:
        text = f"released {entry.released} by {entry.released_by}: {entry.released_because}"
        echo(f"    {text}; it must prove itself")
