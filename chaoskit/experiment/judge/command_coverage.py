"""Completeness of journals and logs of a command's run: all data that its verdict is computed from
must be there.

The harness names the nodes, and records the lines that it read and the end of each command. Each
node must record the same of its command, and each log must hold the lines. Data that is missing, or
differs between two records, cannot be judged.

-> experiment/judge/coverage.py: damaged journals, and the verdict of such a run.
experiment/run/legibility.py: a log that is whole, but whose steps cannot be counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from chaoskit.experiment.judge.coverage import Coverage, damage
from chaoskit.experiment.run.command_run import LOGS, NODE_ROLES, CommandRun, describe_end
from chaoskit.experiment.run.run import LATER
from chaoskit.experiment.twin.command_twin import CommandTwin, taken_nodes
from chaoskit.stacks.log import LogReader
from chaoskit.vocabulary import Event, RunEnd

_CHUNK_BYTES = 1 << 20


def coverage_of(run: CommandRun, twin: CommandTwin | None) -> Coverage:
    """Return the data in the directory of ``run`` that is missing or contradicts itself, in words.

    All of it is ``blind``: a failed check then makes the run unknown.

    Args:
        run: the records of the run.
        twin: the unbroken run in its directory, or None.
    """
    blind = [
        *damage(run.coverage),
        *_harness_gaps(run),
        *_node_gaps(run),
        *_cut_gaps(run),
        *_log_gaps(run),
        *_fault_gaps(run),
        *_twin_gaps(run, twin),
    ]
    return Coverage(tuple(blind), ())


def _harness_gaps(run: CommandRun) -> Iterator[str]:
    """Yield, in words, what is missing in the harness's journal, and the lack of whole nodes."""
    if run.started is None:
        yield "harness: the record of the start of the run is missing"
    if run.reason == RunEnd.ENDED:
        for node in run.nodes:
            if node not in run.exits:
                yield f"harness: the record of the end of the command on {node} is missing"
    if len(run.nodes) < run.experiment.nodes:
        yield f"only {len(run.nodes)} of {run.experiment.nodes} nodes have a journal"


def _node_gaps(run: CommandRun) -> Iterator[str]:
    """Yield, in words, what is missing in the journals of nodes, or contradicts the harness."""
    for node in run.nodes:
        file = run.coverage.get(node)
        if file is None or not any(writer.role in NODE_ROLES for writer in file.writers):
            yield f"{node}: its journal is missing"
            continue
        if (
            run.started is not None
            and min(writer.first_ns for writer in file.writers) < run.started_ns
        ):
            yield f"{node}: its journal begins before the run"
        if run.experiment.running_job is not None:
            if not any(life.source == node for life in run.lives):
                yield f"{node}: no container of it was observed"
        elif node not in run.commands:
            yield f"{node}: the record of the start of its command is missing"
        yield from _end_gaps(run, node)


def _end_gaps(run: CommandRun, node: str) -> Iterator[str]:
    """Yield, in words, how the records of a command's end by its node and the harness differ.

    Nothing is yielded for a command that the harness did not see end.
    """
    end_records = [
        record
        for record in run.records
        if record.event == Event.COMMAND_EXITED and record.source == node
    ]
    reported = run.exits.get(node)
    # the deadline ended the command, or the node was lost
    if reported is None or reported[0] == "lost":
        return
    if not end_records:
        yield f"{node}: the record of the end of its command is missing"
    elif (own_end := (end_records[-1]["how"], end_records[-1]["status"])) != reported:
        yield f"{node}: its command {describe_end(*own_end)}, but the harness recorded that it {describe_end(*reported)}"


def _cut_gaps(run: CommandRun) -> Iterator[str]:
    """Yield, in words, each node that went without a fault before its records were received."""
    gone_nodes = taken_nodes(run)
    for record in run.records:
        if record.event == Event.RECORDS_CUT and record["node"] not in gone_nodes:
            yield f"{record['node']}: it went before all of its journal and log were received"


def _log_gaps(run: CommandRun) -> Iterator[str]:
    """Yield, in words, each difference between the logs and the lines that the harness recorded.

    A log that cannot be read ends the comparison.
    """
    line_count, all_whole = 0, True
    for node in run.nodes:
        log_name, is_whole = f"{LOGS}/{node}.log", _is_whole(run, node)
        read_lines = [(line.step, line.loss) for line in run.lines if line.node == node]
        reader = LogReader(run.experiment.watch)
        try:
            shown_lines = _shown(
                run,
                node,
                reader,
                limits=None if is_whole else (len(read_lines), run.lines_read - line_count),
            )
        except OSError as error:
            yield f"{log_name}: it cannot be read ({error.strerror})"
            return
        line_count, all_whole = line_count + reader.lines, all_whole and is_whole
        different = [
            position
            for position, (line, read_line) in enumerate(zip(shown_lines, read_lines, strict=False))
            if line != read_line
        ]
        if different:
            yield f"{log_name}: line {different[0] + 1} of those with a step or loss differs from the line that was read"
        elif len(shown_lines) < len(read_lines) or (
            is_whole and len(shown_lines) > len(read_lines)
        ):
            yield f"{log_name}: {len(shown_lines)} lines show a step or a loss, but {len(read_lines)} were read"
    if line_count < run.lines_read or (all_whole and line_count > run.lines_read):
        yield f"{LOGS}: the logs have {line_count} lines, but {run.lines_read} were read"


def _shown(
    run: CommandRun, node: str, reader: LogReader, limits: tuple[int, int] | None
) -> list[tuple[int | None, str | None]]:
    """Return the step and loss of each line of a log that shows one, in the order of the log.

    Args:
        run: the records of the run.
        node: the node that wrote the log.
        reader: the reader of the log, which counts its lines.
        limits: for a log that grew after its last read: the number of lines with a step or loss,
            and of all lines, after which the rest is ignored. None reads the whole log.

    Raises:
        OSError: if the log cannot be read.
    """
    shown_lines: list[tuple[int | None, str | None]] = []
    with (run.directory / LOGS / f"{node}.log").open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            shown_lines += [(line.step, line.loss) for line in reader.feed(node, data, 0)]
            if limits is not None and len(shown_lines) >= limits[0] and reader.lines >= limits[1]:
                break
    return shown_lines


def _is_whole(run: CommandRun, node: str) -> bool:
    """Return whether the harness read a log to its end.

    A command that is ended by force may write until then.
    """
    has_seen_end = run.exits.get(node, ("lost", ""))[0] != "lost"
    return run.reason == RunEnd.ENDED and has_seen_end and node not in taken_nodes(run)


def _fault_gaps(run: CommandRun) -> Iterator[str]:
    """Yield, in words, each fault that acted without a record of whether it was undone.

    Nothing is yielded if the harness was lost, which another check reports.
    """
    undone = {record["fault"] for record in run.records if record.event == Event.UNDONE}
    for injection in run.injections:
        if (
            injection.target is not None
            and not injection.missed
            and injection.fault_id not in undone
            and not run.harness_lost
        ):
            yield f"harness: no record shows whether {injection.fault} was undone"


def _twin_gaps(run: CommandRun, twin: CommandTwin | None) -> Iterator[str]:
    """Yield a problem in words if the unbroken run is missing, or is not the planned one.

    One that is made later has no id before, and may not be made at all: a check says so.
    """
    planned_id = run.twin_id
    if run.started is None or planned_id == LATER:
        return
    if planned_id and twin is None:
        yield "twin.json: the result of the unbroken run is missing"
    elif twin is not None and twin.run_id != planned_id:
        planned_in_words = f"with {planned_id[:8]}" if planned_id else "with none"
        yield f"twin.json: it belongs to the run {twin.run_id[:8]}, but the plan compares this run {planned_in_words}"
