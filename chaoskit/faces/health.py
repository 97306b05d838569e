"""``chaoskit health``: whether this machine is fit to train."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaoskit.errors import BadInput
from chaoskit.faces.ending import print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chaoskit.health import Finding, HealthVerdict

_TOKEN = "CHAOSKIT_HEALTH_TOKEN"
_TOKEN_LEAST = 16
_STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}

app = typer.Typer(
    help="Examine this machine before it trains: GPUs, clock, disk, memory, processor, and the network to others.",
    invoke_without_command=True,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


@app.callback()
def health(
    context: typer.Context,
    directory: Annotated[Path, typer.Option(help="Where runs write on this machine.")] = Path(),
    only: Annotated[
        list[str] | None, typer.Option(metavar="PROBE", help="gpu, clock, disk, memory or compute; repeatable.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Test the network to [bold]chaoskit health serve[/] there; repeatable."),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another limit than the default; repeatable.")
    ] = None,
    node: Annotated[str, typer.Option(help="Name under which it may be quarantined. Default: the host's.")] = "",
    machine: Json = False,
) -> None:
    """Look at this machine, and say whether it is fit to train.

    Nothing is changed, and nothing is left behind. Limits and what they are based on:
    docs/health.md. A node that was released from quarantine and passes whole has proved
    itself. For [bold]--against[/] both sides need the same CHAOSKIT_HEALTH_TOKEN.

    Exit code 0: fit, with warnings or without, 1: refused or in quarantine, 2: bad input.

    Examples: [cyan]chaoskit health --limit gpus_expected=8[/],
    [cyan]chaoskit health --only disk --directory /mnt/run --json[/]
    """
    if context.invoked_subcommand is not None:
        return
    from chaoskit.health import Quarantine, decide
    from chaoskit.health.examine import PROBES, examine
    from chaoskit.health.limits import parse_limits
    from chaoskit.nodename import name_of_this_machine, require_node_name
    from chaoskit.substrate.undo import state_directory

    unknown = sorted(set(only or ()).difference(PROBES))
    if unknown:
        raise BadInput("only", unknown[0], f"write one of {', '.join(PROBES)}")
    if node:
        require_node_name("node", node)
    name = node or name_of_this_machine()
    limits = parse_limits(limit or [])
    addresses = tuple(map(parse_address, against or []))
    token = _token() if addresses else ""
    quarantine = Quarantine(state_directory())
    kept_out = next((one for one in quarantine.entries() if one.node == name and not one.on_probation), None)
    found = examine(name, directory, limits, only=tuple(only or PROBES), against=addresses, token=token)
    verdict = decide(name, found)
    proved = not verdict.refused and not only and quarantine.prove(name)
    told = {"quarantined": kept_out.reason if kept_out else "", "proved": proved}
    if machine:
        print_json(plain(found, verdict) | told)
    else:
        from chaoskit.report.terminal import Terminal

        console = Terminal()
        console.print(render(found, verdict))
        if kept_out:
            console.print(f"in quarantine since {kept_out.since}: {kept_out.reason}", style="red")
        if proved:
            console.print("it was released, and has proved itself", style="green")
    if verdict.refused or kept_out:
        raise typer.Exit(1)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen at, as others reach it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.")] = 0,
) -> None:
    """Answer the network tests of other machines, until it is ended with Ctrl-C.

    Without CHAOSKIT_HEALTH_TOKEN a token is made and printed; the other side needs it.

    Example: [cyan]chaoskit health serve --host 10.0.0.7 --port 7000[/]
    """
    from chaoskit.health.pair import PairServer

    token = _token() if os.environ.get(_TOKEN) else secrets.token_hex(_TOKEN_LEAST)
    try:
        server = PairServer(token, socket.create_server((host, port)))
    except (OSError, OverflowError) as error:
        raise BadInput("host", f"{host}:{port}", f"choose an address and port that are free here ({error})") from None
    with server:
        if not os.environ.get(_TOKEN):
            typer.echo(f"{_TOKEN}={token}")
        typer.echo(f"listening on {server.address[0]}:{server.address[1]}")
        signal.pause()


def _token() -> str:
    token = os.environ.get(_TOKEN, "")
    if len(token) < _TOKEN_LEAST:
        raise BadInput(_TOKEN, "*" * len(token), f"set it to what the other side has, {_TOKEN_LEAST} letters or more")
    return token


def parse_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``. Raises BadInput for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadInput("against", text, "write HOST:PORT, as chaoskit health serve prints it")
    return host.strip("[]"), int(port)


def plain(found: list[Finding], verdict: HealthVerdict) -> dict[str, Any]:
    """For machines."""
    import msgspec

    findings = [msgspec.to_builtins(one) for one in found]
    return {"ok": not verdict.refused, **msgspec.to_builtins(verdict), "findings": findings}


def render(found: list[Finding], verdict: HealthVerdict) -> RenderableType:
    """For people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from chaoskit.health.verdict import show

    table = Table("", "what", "value", "limit", "")
    for one in found:
        notes = "\n".join(filter(None, (one.detail, one.remedy and f"→ {one.remedy}")))
        style = _STYLES[one.severity]
        table.add_row(Text(one.severity, style), one.what, show(one.value), show(one.limit), Text(notes, "dim"))
    worst = "bad" if verdict.refused else "warn" if verdict.reasons else "ok"
    lines = [Text(f"  {reason}", "dim") for reason in verdict.reasons]
    return Group(table, Text(f"{verdict.node}: {verdict.standing}", f"bold {_STYLES[worst]}"), *lines)
