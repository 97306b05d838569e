"""``chaoskit scale``: change the number of nodes of a running job.

-> elastic/client.py: the request. coordinator/handlers/on_size_request.py: the decision about it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import msgspec
import typer

from chaoskit.cli.output import EXIT_FAILED, Json, Run, command_app, print_json, reply_text
from chaoskit.elastic.client import RunClient, Unanswered, WorldState, newest_live_run
from chaoskit.errors import BadInput
from chaoskit.plaintext import echo
from chaoskit.process.linux import user_at_host

_LOOK_S = 0.1

app = command_app()


@app.command()
def scale(
    size: Annotated[int, typer.Argument(help="New number of nodes.")],
    run: Run = None,
    wait_s: Annotated[
        float, typer.Option(help="Seconds to wait for the new size; 0 returns after the reply.")
    ] = 60.0,
    is_json: Json = False,
) -> int:
    """Change the number of nodes of a running job, while training goes on.

    The elastic policy of the run must allow the size. Missing nodes are started on this machine.
    Ranks leave between two steps: no step and no sample is lost, and with the exact reduction no
    bit changes.

    Requests can also be sent by HTTP, see DIR/control.json, or from Python:
    [bold]chaoskit.RunClient(DIR).scale(6)[/].

    Exit code 0: done, 1: refused, or not done in time, 2: bad input.

    Example: [cyan]chaoskit scale 6[/]
    """
    if not 0 <= wait_s < float("inf"):
        raise BadInput("wait_s", wait_s, "use a number of seconds, 0 or more")
    target = RunClient(run or newest_live_run())
    reply = target.scale(size, user_at_host())
    state = _await_size(target, size, wait_s) if reply.accepted and wait_s else target.state()
    done = reply.accepted and (not wait_s or state.world == size)
    if is_json:
        print_json(
            {"done": done, **msgspec.to_builtins(reply), "state": msgspec.to_builtins(state)}
        )
    else:
        echo(reply_text(reply))
        if reply.accepted and wait_s:
            progress = (
                f"{state.world} ranks train (generation {state.generation}, step {state.step})"
            )
            echo(progress if done else f"not yet, after {wait_s:g} s: {progress}")
    return 0 if done else EXIT_FAILED


def _await_size(run: RunClient, size: int, wait_s: float) -> WorldState:
    """Wait until the world has a size, the time is over, or the job ends.

    Return the last state that was received; an empty state if the job did not answer.
    """
    deadline_s = time.monotonic() + wait_s
    state = WorldState()
    with contextlib.suppress(Unanswered):  # the job has ended in the meantime
        state = run.state()
        while state.world != size and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            state = run.state()
    return state
