"""``chaoskit trace``: export a run as an OpenTelemetry trace.

-> observe/spans.py: the spans. observe/otel.py: the export.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from chaoskit.cli.output import EXIT_FAILED, Json, RunDirectory, command_app, print_json
from chaoskit.errors import BadInput
from chaoskit.observe import otel
from chaoskit.observe.follower import Follower, newest_run

app = command_app()


@app.command()
def trace(
    run_dir: RunDirectory = None,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send the trace to this OTLP/HTTP receiver, such as http://localhost:4318.",
        ),
    ] = "",
    file: Annotated[
        Path | None, typer.Option(help="Write the trace to this file, as OTLP/JSON.")
    ] = None,
    is_json: Json = False,
) -> int:
    """Export a run as an OpenTelemetry trace: each recovery is a span that contains its phases.

    Give [bold]--otlp-endpoint[/], [bold]--file[/], or both. A run has one trace. A second export
    yields the same trace.

    Exit code 0: exported, 1: the receiver did not accept it, 2: bad input.

    Example: [cyan]chaoskit trace --file trace.json[/]
    """
    if not otlp_endpoint and file is None:
        raise BadInput("otlp_endpoint", "", "name a receiver, or give --file")
    url = otel.validate_endpoint("otlp_endpoint", otlp_endpoint) if otlp_endpoint else ""
    otel.require_libraries("otlp_endpoint" if url else "file", url or str(file))
    directory = newest_run(run_dir)
    follower = Follower(directory)
    follower.finish()
    if follower.started is None:
        raise BadInput(
            "run_dir",
            str(directory),
            "name a run of this version: its journals do not have the start of the run",
        )
    spans = otel.encode_run(follower, follower.started)
    if file is not None:
        otel.write_file(spans, file)
    is_accepted = otel.post(spans, url) if url else None
    if is_json:
        trace_id = format(spans[0].context.trace_id, "032x") if spans[0].context else ""
        print_json(
            {
                "trace_id": trace_id,
                "spans": len(spans),
                "file": str(file) if file else None,
                "taken": is_accepted,
            }
        )
    else:
        sys.stdout.write(
            f"{len(spans)} spans{f' in {file}' if file else ''}{f', sent to {url}' if is_accepted else ''}\n"
        )
    if is_accepted is False:
        sys.stderr.write(f"chaoskit: {url} did not accept the spans\n")
        return EXIT_FAILED
    return 0
