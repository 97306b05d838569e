"""``chaoskit node``: whether this machine is fit to train, which nodes are cordoned, and nodes that leave a run."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from chaoskit.cli.output import EXIT_FAILED, Json, Run, command_app, console, print_json, reply_text
from chaoskit.elastic.client import RunClient, newest_live_run
from chaoskit.errors import BadInput, name_remedy
from chaoskit.health import Entry, Finding, HealthVerdict, Quarantine, decide
from chaoskit.health.examine import PROBES, examine
from chaoskit.health.limits import parse_limits
from chaoskit.health.pair import PairServer
from chaoskit.health.quarantine import state_directory
from chaoskit.health.verdict import show
from chaoskit.nodename import name_of_this_machine, require_node_name
from chaoskit.plaintext import echo
from chaoskit.report.tables import Column, DataTable

_TOKEN = "CHAOSKIT_HEALTH_TOKEN"
_TOKEN_LENGTH_MIN = 16
_STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}

app = command_app(
    "Check whether this machine is fit to train, cordon unfit nodes, and drain nodes of a run."
)

Name = Annotated[str, typer.Argument(metavar="NODE", help="Its name in the run, such as node2.")]


# -- fitness ------------------------------------------------------------------------------------------------------


@app.command()
def check(
    directory: Annotated[Path, typer.Option(help="Where runs write on this machine.")] = Path(),
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PROBE", help="gpu, clock, disk, memory or compute; repeatable."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Test the network to [bold]chaoskit node serve-check[/] there; repeatable.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another limit than the default; repeatable."),
    ] = None,
    node: Annotated[
        str, typer.Option(help="Name under which it may be cordoned. Default: the host's.")
    ] = "",
    machine: Json = False,
) -> int:
    """Examine this machine: GPUs, clock, disk, memory, processor, and the network to others.

    Nothing is changed, and nothing is left behind. Limits and what they are based on:
    docs/health.md. A node that was uncordoned and passes all probes has proved
    itself. For [bold]--against[/] both sides need the same CHAOSKIT_HEALTH_TOKEN.

    Exit code 0: fit, with warnings or without, 1: unfit or cordoned, 2: bad input.

    Examples: [cyan]chaoskit node check --limit gpus_expected=8[/],
    [cyan]chaoskit node check --only disk --directory /mnt/run --json[/]
    """
    unknown = sorted(set(only or ()).difference(PROBES))
    if unknown:
        raise BadInput(
            "only", unknown[0], name_remedy(unknown[0], PROBES, f"write one of {', '.join(PROBES)}")
        )
    if node:
        require_node_name("node", node)
    name = node or name_of_this_machine()
    limits = parse_limits(limit or [])
    addresses = tuple(map(parse_address, against or []))
    token = _token() if addresses else ""
    quarantine = Quarantine(state_directory())
    cordoned = next(
        (one for one in quarantine.entries() if one.node == name and not one.on_probation), None
    )
    found = examine(
        name, directory, limits, only=tuple(only or PROBES), against=addresses, token=token
    )
    verdict = decide(name, found)
    proved = not verdict.refused and not only and quarantine.prove(name)
    if machine:
        told = {"quarantined": cordoned.reason if cordoned else "", "proved": proved}
        print_json(plain(found, verdict) | told)
    else:
        shown = console()
        shown.print(render(found, verdict))
        if cordoned:
            shown.print(f"cordoned since {cordoned.since}: {cordoned.reason}", style="red")
        if proved:
            shown.print("it was uncordoned, and has proved itself", style="green")
    return EXIT_FAILED if verdict.refused or cordoned else 0


@app.command("serve-check")
def serve_check(
    host: Annotated[
        str, typer.Option(help="Address to listen at, as others reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.")] = 0,
) -> None:
    """Answer the network tests of other machines, until it is ended with Ctrl-C.

    Without CHAOSKIT_HEALTH_TOKEN a token is made and printed; the other side needs it.

    Example: [cyan]chaoskit node serve-check --host 10.0.0.7 --port 7000[/]
    """
    token = _token() if os.environ.get(_TOKEN) else secrets.token_hex(_TOKEN_LENGTH_MIN)
    try:
        server = PairServer(token, socket.create_server((host, port)))
    except (OSError, OverflowError) as error:
        raise BadInput(
            "host", f"{host}:{port}", f"choose an address and port that are free here ({error})"
        ) from None
    with server:
        if not os.environ.get(_TOKEN):
            echo(f"{_TOKEN}={token}")
        echo(f"listening on {server.address[0]}:{server.address[1]}")
        signal.pause()


def _token() -> str:
    token = os.environ.get(_TOKEN, "")
    if len(token) < _TOKEN_LENGTH_MIN:
        raise BadInput(
            _TOKEN,
            "*" * len(token),
            f"set it to what the other side has, {_TOKEN_LENGTH_MIN} letters or more",
        )
    return token


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raises BadInput for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadInput("against", text, "write HOST:PORT, as chaoskit node serve-check prints it")
    return host.strip("[]"), int(port)


def plain(found: list[Finding], verdict: HealthVerdict) -> dict[str, Any]:
    """Return findings and verdict as JSON values."""
    findings = [msgspec.to_builtins(one) for one in found]
    return {"ok": not verdict.refused, **msgspec.to_builtins(verdict), "findings": findings}


def render(found: list[Finding], verdict: HealthVerdict) -> RenderableType:
    """Render findings and verdict as a table."""
    numbers = [Column(name, is_number=True) for name in ("value", "limit")]
    what = Column("what", is_heading=True)
    table = DataTable(Column("", is_heading=True), what, *numbers, Column("", is_text=True))
    for one in found:
        notes = "\n".join(filter(None, (one.detail, one.remedy and f"→ {one.remedy}")))
        style = _STYLES[one.severity]
        table.add_row(
            Text(one.severity, style),
            one.what,
            show(one.value),
            show(one.limit),
            Text(notes, "dim"),
        )
    worst = "bad" if verdict.refused else "warn" if verdict.reasons else "ok"
    lines = [Text(f"  {reason}", "dim") for reason in verdict.reasons]
    return Group(
        table, Text(f"{verdict.node}: {verdict.standing}", f"bold {_STYLES[worst]}"), *lines
    )


# -- the list of cordoned nodes -----------------------------------------------------------------------------------


@app.command("list")
def list_(machine: Json = False) -> None:
    """List cordoned nodes with reason, start and probation.

    Example: [cyan]chaoskit node list --json[/]
    """
    entries = Quarantine(state_directory()).entries()
    if machine:
        print_json({"entries": [msgspec.to_builtins(one) for one in entries]})
        return
    for one in entries:
        _show(one)
    if not entries:
        echo("no cordoned nodes")


@app.command()
def cordon(
    node: Name,
    reason: Annotated[str, typer.Option(help="Reason, shown when the node is uncordoned.")],
    evidence: Annotated[list[str] | None, typer.Option(help="What was seen; repeatable.")] = None,
    machine: Json = False,
) -> None:
    """Keep a node out of all runs that are started from here, until it is uncordoned.

    Example: [cyan]chaoskit node cordon node3 --reason "falls off the bus" --evidence "XID 79"[/]
    """
    _tell(Quarantine(state_directory()).add(node, reason, evidence or []), machine)


@app.command()
def uncordon(
    node: Name,
    reason: Annotated[str, typer.Option(help="What was done about it.")],
    machine: Json = False,
) -> None:
    """Let a node come back. It gets workers when it has passed its check.

    Example: [cyan]chaoskit node uncordon node3 --reason "GPU 2 replaced"[/]
    """
    _tell(Quarantine(state_directory()).release(node, reason), machine)


def _tell(entry: Entry, machine: bool) -> None:
    if machine:
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


# -- nodes of a run -----------------------------------------------------------------------------------------------


@app.command()
def drain(
    node: Name,
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds until the node is removed.")
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Take the notice back: the node stays.")
    ] = False,
    run: Run = None,
    machine: Json = False,
) -> int:
    """Tell a running job that a node will be removed: a spot notice, or maintenance.

    The job must have been launched with [bold]--elastic[/]. Ranks of the node leave between
    two steps, and nothing is lost. SIGTERM to the agent of a node says the same.

    Exit code 0: accepted, 1: refused, 2: bad input.

    Example: [cyan]chaoskit node drain node2 --grace-s 30[/]
    """
    if cancel == (grace_s is not None):
        raise BadInput(
            "grace_s", grace_s, "leave out --grace-s or --cancel, and give the other one"
        )
    target = RunClient(run or newest_live_run())
    reply = target.cancel_drain(node) if grace_s is None else target.drain(node, grace_s)
    if machine:
        print_json(msgspec.to_builtins(reply))
    else:
        echo(reply_text(reply))
        for one in reply.nodes:
            echo(one)
    return 0 if reply.accepted else EXIT_FAILED
