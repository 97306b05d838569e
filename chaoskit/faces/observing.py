"""``chaoskit top`` and ``chaoskit trace``: a run seen from another process, while it lasts or afterwards."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chaoskit.errors import BadInput
from chaoskit.faces.ending import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from chaoskit.observe.follow import Follower

_FRAME_S = 0.25
_IDLE_PER_WORK = 60  # a frame is followed by so many times the CPU time that it took: at most 1.6 % of one CPU
_PIPE_COLUMNS = 120
_EXIT_FAILED = 1

RunDir = Annotated[
    Path | None, typer.Argument(metavar="[RUN_DIR]", help="Of a run. Default: the newest below ./chaoskit-runs.")
]


def top(
    run_dir: RunDir = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60.0, help="Tell the ratios of the last so many minutes, too.")
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end; so does a pipe.")] = False,
    machine: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
    ] = False,
) -> None:
    """Show nodes, ranks, phases, tiers and events of a run, live.

    It reads the run's journals as they grow, and the heartbeats that the
    launcher shows. Of a run that is over it shows the end. Ctrl-C ends the
    view, not the run.

    Example: [cyan]chaoskit top[/]
    """
    from chaoskit.observe.follow import Follower, newest_run
    from chaoskit.observe.frame import frame_of
    from chaoskit.observe.live import read_live

    directory = newest_run(run_dir)
    follower = Follower(directory)
    follower.poll()
    if follower.is_over:
        follower.finish()
    if machine:
        print_json(frame_of(follower, read_live(directory), str(directory), minutes * 60).plain())
        return
    from chaoskit.observe.picture import draw
    from chaoskit.report.terminal import Terminal

    console = Terminal()
    if once or not console.is_terminal:
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _PIPE_COLUMNS
        console.print(draw(frame_of(follower, read_live(directory), str(directory), minutes * 60)))
        return
    _show(console, follower, directory, minutes * 60)


def _show(console: Console, follower: Follower, directory: Path, window_s: float) -> None:
    """Until the run is over, or the user has seen enough."""
    from rich.live import Live

    from chaoskit.observe.frame import frame_of
    from chaoskit.observe.live import read_live
    from chaoskit.observe.picture import draw

    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as picture:
        while True:
            began_s = time.process_time()
            over = follower.is_over
            follower.finish() if over else follower.poll()
            frame = frame_of(follower, read_live(directory), str(directory), window_s)
            picture.update(draw(frame, console.height), refresh=True)
            if over:
                return
            time.sleep(max(_FRAME_S, _IDLE_PER_WORK * (time.process_time() - began_s)))


def trace(
    run_dir: RunDir = None,
    otlp_endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Send it to this OTLP/HTTP receiver, such as http://localhost:4318.")
    ] = "",
    file: Annotated[Path | None, typer.Option(help="Write it into this file, as OTLP/JSON.")] = None,
    machine: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
    ] = False,
) -> int:
    """Export a run as an OpenTelemetry trace: each recovery a span, its phases within.

    One trace a run. Exported twice, it is the same trace.

    Exit code 0: exported, 1: the receiver did not take it, 2: bad input.

    Example: [cyan]chaoskit trace --file trace.json[/]
    """
    from chaoskit.observe import otel
    from chaoskit.observe.follow import Follower, newest_run

    if not otlp_endpoint and file is None:
        raise BadInput("otlp_endpoint", "", "name a receiver, or a file by --file")
    url = otel.validate_endpoint("otlp_endpoint", otlp_endpoint) if otlp_endpoint else ""
    otel.require_libraries("file", str(file or url))
    directory = newest_run(run_dir)
    follower = Follower(directory)
    follower.finish()
    if follower.started is None:
        raise BadInput("run_dir", str(directory), "name a run of this version: it does not say when it was started")
    spans = otel.encode_run(follower)
    if file is not None:
        otel.write_file(spans, file)
    taken = otel.post(spans, url) if url else None
    if machine:
        trace_id = format(spans[0].context.trace_id, "032x") if spans[0].context else ""
        print_json({"trace_id": trace_id, "spans": len(spans), "file": str(file) if file else None, "taken": taken})
    else:
        sys.stdout.write(f"{len(spans)} spans{f' in {file}' if file else ''}{f', sent to {url}' if taken else ''}\n")
    if taken is False:
        sys.stderr.write(f"chaoskit: {url} did not take the spans\n")
        return _EXIT_FAILED
    return 0
