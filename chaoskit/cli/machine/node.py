"""``chaoskit node``: check this machine, cordon unfit nodes, and drain nodes of a run.

-> health/examine.py: the checks. health/verdict.py: the decision that a node is unfit.
-> health/quarantine.py: the cordoned nodes. elastic/client.py: the request to drain.
"""

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
from chaoskit.health import Finding, HealthVerdict, Quarantine, QuarantineEntry, decide
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

Name = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node in the run, such as node2.")
]


# -- fitness ---------------------------------------------------------------------------------------


@app.command()
def check(
    directory: Annotated[Path, typer.Option(help="Where runs write on this machine.")] = Path(),
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROBE",
            help="Run only this probe: gpu, clock, disk, memory or compute; repeatable.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Also test the network to [bold]chaoskit node serve-check[/] there; repeatable.",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Limit to use instead of the default; repeatable."),
    ] = None,
    node: Annotated[
        str,
        typer.Option(help="Name under which this machine may be cordoned. Default: its host name."),
    ] = "",
    is_json: Json = False,
) -> int:
    """Examine this machine: GPUs, clock, disk, memory, processor, and the network to others.

    The check changes nothing and leaves nothing behind. docs/health.md lists the limits and their
    sources. A node that was uncordoned is confirmed if it passes all probes. For [bold]--against[/]
    both sides need the same CHAOSKIT_HEALTH_TOKEN.

    Exit code 0: fit, with warnings or without, 1: unfit or cordoned, 2: bad input.

    Examples: [cyan]chaoskit node check --limit gpus_expected=8[/], [cyan]chaoskit node check --only
    disk --directory /mnt/run --json[/]
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
        (entry for entry in quarantine.entries() if entry.node == name and not entry.on_probation),
        None,
    )
    findings = examine(
        name, directory, limits, only=tuple(only or PROBES), against=addresses, token=token
    )
    verdict = decide(name, findings)
    proved = not verdict.refused and not only and quarantine.prove(name)
    if is_json:
        standing = {"quarantined": cordoned.reason if cordoned else "", "proved": proved}
        print_json(plain(findings, verdict) | standing)
    else:
        terminal = console()
        terminal.print(render(findings, verdict))
        if cordoned:
            terminal.print(f"cordoned since {cordoned.since}: {cordoned.reason}", style="red")
        if proved:
            terminal.print("the node was uncordoned, and is confirmed by this check", style="green")
    return EXIT_FAILED if verdict.refused or cordoned else 0


@app.command("serve-check")
def serve_check(
    host: Annotated[
        str, typer.Option(help="Address to listen at, under which other machines reach this one.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free port.")] = 0,
) -> None:
    """Answer network tests of other machines, until the command is ended with Ctrl-C.

    Without CHAOSKIT_HEALTH_TOKEN a token is generated and printed. The other side must set it.

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
    """Return the token in CHAOSKIT_HEALTH_TOKEN. Raise BadInput if it is missing or too short."""
    token = os.environ.get(_TOKEN, "")
    if len(token) < _TOKEN_LENGTH_MIN:
        raise BadInput(
            _TOKEN,
            "*" * len(token),
            f"set it to the token of the other side: {_TOKEN_LENGTH_MIN} characters or more",
        )
    return token


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``. Raise BadInput for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadInput("against", text, "write HOST:PORT, as chaoskit node serve-check prints it")
    return host.strip("[]"), int(port)


def plain(findings: list[Finding], verdict: HealthVerdict) -> dict[str, Any]:
    """Return verdict and findings as JSON values; ``ok`` is False if the node is refused."""
    rows = [msgspec.to_builtins(finding) for finding in findings]
    return {"ok": not verdict.refused, **msgspec.to_builtins(verdict), "findings": rows}


def render(findings: list[Finding], verdict: HealthVerdict) -> RenderableType:
    """Return a table of the findings, followed by the verdict and its reasons."""
    numbers = [Column(name, is_number=True) for name in ("value", "limit")]
    subject = Column("what", is_heading=True)
    table = DataTable(Column("", is_heading=True), subject, *numbers, Column("", is_text=True))
    for finding in findings:
        notes = "\n".join(filter(None, (finding.detail, finding.remedy and f"→ {finding.remedy}")))
        style = _STYLES[finding.severity]
        table.add_row(
            Text(finding.severity, style),
            finding.what,
            show(finding.value),
            show(finding.limit),
            Text(notes, "dim"),
        )
    worst = "bad" if verdict.refused else "warn" if verdict.reasons else "ok"
    lines = [Text(f"  {reason}", "dim") for reason in verdict.reasons]
    return Group(
        table, Text(f"{verdict.node}: {verdict.standing}", f"bold {_STYLES[worst]}"), *lines
    )


# -- the list of cordoned nodes --------------------------------------------------------------------


@app.command("list")
def list_(is_json: Json = False) -> None:
    """List cordoned nodes with reason, start and probation.

    Example: [cyan]chaoskit node list --json[/]
    """
    entries = Quarantine(state_directory()).entries()
    if is_json:
        print_json({"entries": [msgspec.to_builtins(entry) for entry in entries]})
        return
    for entry in entries:
        _print_lines(entry)
    if not entries:
        echo("no cordoned nodes")


@app.command()
def cordon(
    node: Name,
    reason: Annotated[str, typer.Option(help="Reason, shown when the node is uncordoned.")],
    evidence: Annotated[
        list[str] | None, typer.Option(help="Observation that led to this; repeatable.")
    ] = None,
    is_json: Json = False,
) -> None:
    """Keep a node out of all runs that are started from here, until it is uncordoned.

    Example: [cyan]chaoskit node cordon node3 --reason "falls off the bus" --evidence "XID 79"[/]
    """
    _print_entry(Quarantine(state_directory()).add(node, reason, evidence or []), is_json)


@app.command()
def uncordon(
    node: Name,
    reason: Annotated[str, typer.Option(help="Reason, such as the repair that was made.")],
    is_json: Json = False,
) -> None:
    """Allow a node to be used again. It gets workers once it has passed its check.

    Example: [cyan]chaoskit node uncordon node3 --reason "GPU 2 replaced"[/]
    """
    _print_entry(Quarantine(state_directory()).release(node, reason), is_json)


def _print_entry(entry: QuarantineEntry, is_json: bool) -> None:
    """Print an entry as lines, or as JSON."""
    if is_json:
        print_json(msgspec.to_builtins(entry))
    else:
        _print_lines(entry)


def _print_lines(entry: QuarantineEntry) -> None:
    """Print an entry as lines."""
    echo(f"{entry.node}: {entry.reason} (since {entry.since}, by {entry.by})")
    for line in entry.evidence:
        echo(f"    {line}")
    if entry.on_probation:
        text = f"released {entry.released} by {entry.released_by}: {entry.released_because}"
        echo(f"    {text}; the node must pass its check")


# -- nodes of a run --------------------------------------------------------------------------------


@app.command()
def drain(
    node: Name,
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds until the node is removed.")
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Withdraw the notice: the node stays.")
    ] = False,
    run: Run = None,
    is_json: Json = False,
) -> int:
    """Announce to a running job that a node will be removed: a spot notice, or maintenance.

    Give either [bold]--grace-s[/] or [bold]--cancel[/]. The job must have been launched with
    [bold]--elastic[/]. Ranks of the node leave between two steps, and no work is lost. SIGTERM to
    the agent of a node has the same effect.

    Exit code 0: accepted, 1: refused, 2: bad input.

    Example: [cyan]chaoskit node drain node2 --grace-s 30[/]
    """
    if cancel == (grace_s is not None):
        raise BadInput("grace_s", grace_s, "give either --grace-s or --cancel")
    target = RunClient(run or newest_live_run())
    reply = target.cancel_drain(node) if grace_s is None else target.drain(node, grace_s)
    if is_json:
        print_json(msgspec.to_builtins(reply))
    else:
        echo(reply_text(reply))
        for line in reply.nodes:
            echo(line)
    return 0 if reply.accepted else EXIT_FAILED
