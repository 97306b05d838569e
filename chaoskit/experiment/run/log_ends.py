"""Parts of a command's logs that show why it failed, and advice on these failures.

-> stacks/log_end.py: which line looks like the error, and which advice fits.
experiment/judge/command_judge.py adds both to the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaoskit.experiment.run.command_run import LOGS, CommandRun
from chaoskit.runlog.outcome import LogEnd
from chaoskit.stacks.log_end import find_error, find_hints, read_lines

_NODES_MAX = 3  # logs of so many nodes are shown; the others mostly show the same


def log_ends(run: CommandRun, nodes: Iterable[str]) -> list[LogEnd]:
    """Return a part of the log of at most three of ``nodes``, those with an error first.

    Nodes with a log that is empty or cannot be read are left out.
    """
    ends = [_log_end(run, node) for node in nodes]
    return sorted((end for end in ends if end.lines), key=lambda end: not end.error)[:_NODES_MAX]


def hints(run: CommandRun) -> list[str]:
    """Return advice on the failures that the logs of a run name, each sentence once."""
    log_paths, command = sorted((run.directory / LOGS).glob("*.log")), run.experiment.command
    stood_still = run.has_stalled or run.deadline_passed
    return list(
        dict.fromkeys(
            hint
            for path in log_paths
            for hint in find_hints(path, command, stood_still=stood_still)
        )
    )


def _log_end(run: CommandRun, node: str) -> LogEnd:
    """Return the part of a node's log that shows its error, or else its last lines."""
    path = run.directory / LOGS / f"{node}.log"
    error_part = find_error(
        read_lines(path), lambda line: run.experiment.watch.read(line) is not None
    )
    return LogEnd(node=node, path=str(path), error=error_part.error, lines=list(error_part.lines))
