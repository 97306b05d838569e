"""``chaoskit top``: show a run from another process, while it lasts or afterwards.

-> observe/follower.py: the state of the run. observe/frame.py and observe/picture.py: the view.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from chaoskit.cli.output import Json, RunDirectory, command_app, console, print_json
from chaoskit.observe.follower import Follower, newest_run
from chaoskit.observe.frame import frame_of
from chaoskit.observe.live import read_live
from chaoskit.observe.picture import draw

_FRAME_S = 0.25
_IDLE_PER_WORK = (
    60  # each frame is followed by this multiple of its CPU time: at most 1.6 % of one CPU
)
_PIPE_COLUMNS = 120

app = command_app()


@app.command()
def top(
    run_dir: RunDirectory = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="Also show ratios over the last N minutes.")
    ] = 10.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print the state once and end, as when the output is a pipe."),
    ] = False,
    is_json: Json = False,
) -> None:
    """Show nodes, ranks, phases, tiers and events of a run, live.

    The view reads the run's journals as they grow, and the heartbeats that the launcher provides.
    If the run is over, it shows the end. Ctrl-C ends the view, not the run.

    Example: [cyan]chaoskit top[/]
    """
    directory = newest_run(run_dir)
    follower = Follower(directory)
    follower.poll()
    if follower.is_over:
        follower.finish()
    if is_json:
        print_json(frame_of(follower, read_live(directory), str(directory), minutes * 60).plain())
        return
    screen = console()
    if once or not screen.is_terminal:
        if not screen.is_terminal and "COLUMNS" not in os.environ:
            screen.width = _PIPE_COLUMNS
        screen.print(draw(frame_of(follower, read_live(directory), str(directory), minutes * 60)))
        return
    _show(screen, follower, directory, minutes * 60)


def _show(screen: Console, follower: Follower, directory: Path, window_s: float) -> None:
    """Draw the run until it is over, or the user ends the view."""
    with Live(
        console=screen, auto_refresh=False, screen=False, vertical_overflow="crop"
    ) as picture:
        while True:
            began_s = time.process_time()
            is_over = follower.is_over
            follower.finish() if is_over else follower.poll()
            frame = frame_of(follower, read_live(directory), str(directory), window_s)
            picture.update(draw(frame, screen.height), refresh=True)
            if is_over:
                return
            time.sleep(max(_FRAME_S, _IDLE_PER_WORK * (time.process_time() - began_s)))
