"""``chaoskit scale`` and its neighbours: another size for a job that trains."""

from __future__ import annotations

import contextlib
import getpass
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from chaoskit.elastic.client import RequestReply, RunClient, Unanswered, WorldState, newest_run
from chaoskit.errors import BadInput
from chaoskit.faces.ending import print_json
from chaoskit.plaintext import echo

_LOOK_S = 0.1
_EXIT_REFUSED = 1

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]
Where = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Of the run; default: the newest below chaoskit-runs.")
]


def scale(
    size: Annotated[int, typer.Argument(help="Nodes that the world shall have from now on.")],
    run: Where = None,
    wait_s: Annotated[
        float, typer.Option(help="Wait so long until a world of that size trains; 0: only for the answer.")
    ] = 60.0,
    machine: Json = False,
) -> int:
    """Give a job that trains more nodes, or fewer. It does not stop for it.

    The size must be one that the elastic policy of the run allows. On this machine
    nodes that are missing are started. Whoever leaves does so between two steps:
    no step and no sample is lost, and with the exact reduction no bit changes.

    The same can be asked by HTTP (see DIR/control.json) and from Python:
    [bold]chaoskit.elastic.client.Run(DIR).scale(6)[/].

    Exit code 0: done, 1: refused, or not done in time, 2: bad input.

    Example: [cyan]chaoskit scale 6[/]
    """
    if not 0 <= wait_s < float("inf"):
        raise BadInput("wait_s", wait_s, "use a number of seconds, 0 or more")
    target = RunClient(run or newest_run())
    reply = target.scale(size, getpass.getuser())
    state = _await(target, size, wait_s) if reply.accepted and wait_s else target.state()
    done = reply.accepted and (not wait_s or state.world == size)
    if machine:
        print_json({"done": done, **msgspec.to_builtins(reply), "state": msgspec.to_builtins(state)})
    else:
        echo(_in_words(reply))
        if reply.accepted and wait_s:
            trains = f"{state.world} ranks train (generation {state.generation}, step {state.step})"
            echo(trains if done else f"not yet, after {wait_s:g} s: {trains}")
    return 0 if done else _EXIT_REFUSED


def _await(run: RunClient, size: int, wait_s: float) -> WorldState:
    deadline_s = time.monotonic() + wait_s
    state = run.state()
    with contextlib.suppress(Unanswered):  # the job has ended meanwhile
        while state.world != size and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            state = run.state()
    return state


def notice(
    node: Annotated[str, typer.Argument(help="Name of the node, such as node2.")],
    grace_s: Annotated[float | None, typer.Option(help="In so many seconds it will be taken away.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="It stays after all: take the notice back.")] = False,
    run: Where = None,
    machine: Json = False,
) -> int:
    """Tell a job that a node will be taken away: a spot notice, or maintenance.

    Its ranks leave between two steps, and nothing is lost. SIGTERM to the agent of
    a node says the same.

    Example: [cyan]chaoskit notice node2 --grace-s 30[/]
    """
    if cancel == (grace_s is not None):
        raise BadInput("grace_s", grace_s, "say in how many seconds the node is taken away, or --cancel that it stays")
    target = RunClient(run or newest_run())
    return _tell(target.cancel_notice(node) if grace_s is None else target.notice(node, grace_s), machine)


def _tell(reply: RequestReply, machine: bool) -> int:
    if machine:
        print_json(msgspec.to_builtins(reply))
    else:
        echo(_in_words(reply))
        for node in reply.nodes:
            echo(node)
    return 0 if reply.accepted else _EXIT_REFUSED


def _in_words(reply: RequestReply) -> str:
    return reply.reason if reply.accepted else f"refused: {reply.reason}"
