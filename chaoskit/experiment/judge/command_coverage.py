"""Whether journals and logs of a command's run tell all that its verdict is computed from.

The harness names the nodes, and says what it read and how each command ended. Each node says the same of its command,
and each log holds what was read of it. What is missing, or told in two ways, cannot be judged.
"""

from __future__ import annotations

from collections.abc import Iterator

from chaoskit.experiment.judge.coverage import Coverage, damage
from chaoskit.experiment.run.command_run import LOGS, CommandRun, describe_end
from chaoskit.experiment.twin.command_twin import CommandTwin, taken_nodes
from chaoskit.stacks.log import LogReader
from chaoskit.vocabulary import Event, RunEnd

_CHUNK_BYTES = 1 << 20


def coverage_of(run: CommandRun, twin: CommandTwin | None) -> Coverage:
    """What is missing in the directory of ``run``. ``twin``: what it holds of the unbroken run."""
    blind = [
        *damage(run.coverage),
        *_harness(run),
        *_nodes(run),
        *_logs(run),
        *_faults(run),
        *_twin(run, twin),
    ]
    return Coverage(tuple(blind), ())


def _harness(run: CommandRun) -> Iterator[str]:
    if run.started is None:
        yield "harness: the begin of the run is missing"
    if run.reason == RunEnd.ENDED:
        for node in run.nodes:
            if node not in run.exits:
                yield f"harness: it does not tell how the command on {node} ended"
    if len(run.nodes) < run.experiment.nodes:
        yield f"{len(run.nodes)} of {run.experiment.nodes} nodes have written anything"


def _nodes(run: CommandRun) -> Iterator[str]:
    for node in run.nodes:
        file = run.coverage.get(node)
        if file is None or not any(writer.role == "warden" for writer in file.writers):
            yield f"{node}: it has written nothing"
            continue
        if (
            run.started is not None
            and min(writer.first_ns for writer in file.writers) < run.started_ns
        ):
            yield f"{node}: its journal begins before the run"
        if node not in run.commands:
            yield f"{node}: it does not tell that it started the command"
        yield from _end(run, node)


def _end(run: CommandRun, node: str) -> Iterator[str]:
    """The end of a command, by the word of its node and by that of the harness."""
    ended = [
        record
        for record in run.records
        if record.event == Event.COMMAND_EXITED and record.source == node
    ]
    told = run.exits.get(node)
    if told is None or told[0] == "lost":  # the deadline ended it, or the node was lost
        return
    if not ended:
        yield f"{node}: it does not tell how its command ended"
    elif (own := (ended[-1]["how"], ended[-1]["status"])) != told:
        yield f"{node}: its command {describe_end(*own)}, and the harness says that it {describe_end(*told)}"


def _logs(run: CommandRun) -> Iterator[str]:
    """What a log shows was read, and what was read is in the log."""
    lines, all_whole = 0, True
    for node in run.nodes:
        place, is_whole = f"{LOGS}/{node}.log", _is_whole(run, node)
        read = [(line.step, line.loss) for line in run.lines if line.node == node]
        reader = LogReader(run.experiment.watch)
        try:
            shown = _shown(
                run, node, reader, limits=None if is_whole else (len(read), run.lines_read - lines)
            )
        except OSError as error:
            yield f"{place}: it cannot be read ({error.strerror})"
            return
        lines, all_whole = lines + reader.lines, all_whole and is_whole
        different = [
            number
            for number, (one, other) in enumerate(zip(shown, read, strict=False))
            if one != other
        ]
        if different:
            yield f"{place}: line {different[0] + 1} of those with a step or loss is another one than was read"
        elif len(shown) < len(read) or (is_whole and len(shown) > len(read)):
            yield f"{place}: {len(shown)} lines show a step or a loss, and {len(read)} were read"
    if lines < run.lines_read or (all_whole and lines > run.lines_read):
        yield f"{LOGS}: it has {lines} lines, and {run.lines_read} were read"


def _shown(
    run: CommandRun, node: str, reader: LogReader, limits: tuple[int, int] | None
) -> list[tuple[int | None, str | None]]:
    """Steps and losses of a log, in its order.

    Args:
        limits: of a log that went on when it was not read any more: so many lines that show something, and so many in
            all, are enough.
    """
    shown: list[tuple[int | None, str | None]] = []
    with (run.directory / LOGS / f"{node}.log").open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            shown += [(line.step, line.loss) for line in reader.feed(node, data, 0)]
            if limits is not None and len(shown) >= limits[0] and reader.lines >= limits[1]:
                break
    return shown


def _is_whole(run: CommandRun, node: str) -> bool:
    """Whether the harness has read a log to its end: a command that is ended by force may write until then."""
    is_seen = run.exits.get(node, ("lost", ""))[0] != "lost"
    return run.reason == RunEnd.ENDED and is_seen and node not in taken_nodes(run)


def _faults(run: CommandRun) -> Iterator[str]:
    undone = {record["fault"] for record in run.records if record.event == Event.UNDONE}
    for one in run.injections:
        if (
            one.target is not None
            and not one.missed
            and one.fault_id not in undone
            and not run.harness_lost
        ):
            yield f"harness: it does not tell whether {one.fault} was undone"


def _twin(run: CommandRun, twin: CommandTwin | None) -> Iterator[str]:
    """The unbroken run is the one that was known when this one began."""
    if run.started is None:
        return
    wanted = run.started["twin"]
    if wanted and twin is None:
        yield "twin.json: what the unbroken run showed is missing"
    elif twin is not None and twin.run_id != wanted:
        other = f"with {wanted[:8]}" if wanted else "with none"
        yield f"twin.json: it is of the run {twin.run_id[:8]}, and this one was to be compared {other}"
