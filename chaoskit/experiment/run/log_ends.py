"""The parts of a run's logs that say why its command failed, and what helps against it."""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.experiment.run.command_run import LOGS, CommandRun
from chaoskit.runlog.outcome import LogEnd
from chaoskit.stacks.log_end import find_error, find_hints, read_lines

_NODES_MAX = 3  # of which logs are shown; others say the same, most often


def log_ends(run: CommandRun, nodes: Iterable[str]) -> list[LogEnd]:
    """Return a part of the log of each node in ``nodes``, those with an error first, of three nodes at most."""
    ends = [_log_end(run, node) for node in nodes]
    return sorted((end for end in ends if end.lines), key=lambda end: not end.error)[:_NODES_MAX]


def hints(run: CommandRun) -> list[str]:
    """Return what helps against failures that the logs of a run name."""
    logs, command = sorted((run.directory / LOGS).glob("*.log")), run.experiment.command
    stood_still = run.has_stalled or run.deadline_passed
    return list(
        dict.fromkeys(
            hint for path in logs for hint in find_hints(path, command, stood_still=stood_still)
        )
    )


def _log_end(run: CommandRun, node: str) -> LogEnd:
    path = run.directory / LOGS / f"{node}.log"
    part = find_error(read_lines(path), lambda line: run.experiment.watch.read(line) is not None)
    return LogEnd(node=node, path=str(path), error=part.error, lines=list(part.lines))
