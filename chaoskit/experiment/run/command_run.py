"""Run of one experiment with a command: start it on every node, follow it while faults strike it,
end all of its processes. A job that runs already is neither started nor ended.

-> experiment/injection/command_follower.py: what happens between start and end.
stacks/command.py: placeholders of the command. substrate/cluster/command_runner.py: the process
that starts it on a node. experiment/judge/command_judge.py: the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from chaoskit.errors import FaultBroken
from chaoskit.experiment.injection.command_follower import GOOD, CommandFollower
from chaoskit.experiment.plan.command_plan import CommandExperiment, needed_directories
from chaoskit.experiment.run.disruptions import disturbing_pods
from chaoskit.faults.target import ProcessExit
from chaoskit.journal import FileCoverage, Journal, Journals, Record, load_journals
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.injected import InjectionRecord, injections
from chaoskit.stacks.command import CommandNode, arguments, environment, path_on_node
from chaoskit.stacks.log import CommandLogLine
from chaoskit.substrate.core.base import CommandCluster, Substrate
from chaoskit.vocabulary import Event, RunEnd

#: Name of the directory with the output of each node, below the directory of a run.
LOGS = "log"
#: Roles of the writers of a node's journal: its command runner, or the observer of a running job.
NODE_ROLES = ("warden", "place")


@dataclass
class CommandRun:
    """The records of a run of a command, before it is judged. All times are CLOCK_MONOTONIC in ns.

    Attributes:
        experiment: the plan of the run.
        directory: the directory with the journals and logs.
        started: the harness's record of the start of the run, or None if it is missing.
        started_ns: the start of the run; 0 if its record is missing.
        ended_ns: the end of the run; of a run that wrote none, the time of its last record; 0 if
            there is no record at all.
        reason: the reason for the end of the run, of :class:`chaoskit.vocabulary.RunEnd`; "" if it
            is missing.
        exits: node -> the end of its command, as the harness recorded it. Commands that the harness
            ended, at the deadline or because they stalled, are left out.
        lines_read: the number of lines read, over all logs.
        example: the first line that shows no step.
        odd: the first text that the step pattern matched and that is no number.
        unread: the number of lines with a step in a form that cannot be read.
        unread_last: the number of such lines after the last line with a readable step.
        drawn: the number of lines with a step that were overwritten by the next line.
        harness_lost: the harness wrote no end, or failed, so what the run would have shown is not
            known.
    """

    experiment: CommandExperiment
    directory: Path
    started: Record | None
    started_ns: int
    ended_ns: int
    reason: str
    exits: dict[str, ProcessExit]
    lines_read: int
    example: str
    odd: str
    unread: int
    unread_last: int
    drawn: int
    harness_lost: bool = False

    @property
    def deadline_passed(self) -> bool:
        """True if the run was ended because it took too long."""
        return self.reason == RunEnd.DEADLINE

    @property
    def is_aborted(self) -> bool:
        """True if an abort condition of the user ended the run."""
        return self.reason == RunEnd.ABORTED

    @property
    def has_stalled(self) -> bool:
        """True if the run was ended because its log showed no step for too long."""
        return self.reason == RunEnd.STALLED

    @property
    def substrate(self) -> str:
        """The name of the substrate of the nodes; "" if it is not known."""
        return str(self.started["substrate"]) if self.started is not None else ""

    @property
    def run_id(self) -> str:
        """The id of the run; "" if it is not known."""
        return str(self.started["run_id"]) if self.started is not None else ""

    @property
    def twin_id(self) -> str:
        """The run id of the unbroken run to compare with, or ``LATER`` of experiment/run/run.py.

        It is "" if there is none.
        """
        return str(self.started["twin"]) if self.started is not None else ""

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, by number.

        Without a record of the start, these are the nodes with a journal or a known end.
        """
        if self.started is not None:
            return tuple(self.started["names"])
        written_nodes = [
            file.source
            for file in self.coverage.values()
            if any(writer.role in NODE_ROLES for writer in file.writers)
        ]
        return tuple(sorted({*written_nodes, *self.exits}))

    @cached_property
    def commands(self) -> dict[str, Record]:
        """Node -> its record of the command that it started."""
        return {
            record.source: record
            for record in self.records
            if record.event == Event.COMMAND_STARTED
        }

    @cached_property
    def lives(self) -> list[Record]:
        """The records of containers of a running job that were observed, by time."""
        return [record for record in self.records if record.event == Event.LIFE_OBSERVED]

    @cached_property
    def journals(self) -> Journals:
        """The journals of all processes."""
        return load_journals(self.directory / "journal")

    @cached_property
    def records(self) -> list[Record]:
        """The records of all journals, by time."""
        return self.journals.records

    @cached_property
    def disturbing_pods(self) -> list[Record]:
        """The records of pods that something other than the run took away before its end."""
        taken_pods = [record for record in self.records if record.event == Event.POD_TAKEN]
        return disturbing_pods(taken_pods, self.ended_ns, standbys_until_ns=0)

    @cached_property
    def injections(self) -> list[InjectionRecord]:
        """The result of each planned fault."""
        return injections(self.experiment.faults, self.records)

    @property
    def coverage(self) -> Mapping[str, FileCoverage]:
        """The readable part of each journal, by source. Missing records cannot be judged."""
        return self.journals.files

    @cached_property
    def lines(self) -> list[CommandLogLine]:
        """The log lines with a step or a loss, in the order in which they arrived."""
        return [
            CommandLogLine(
                record.t_ns,
                record["node"],
                record["step"],
                record["loss"],
                record.get("late_ns", 0),
            )
            for record in self.records
            if record.event == Event.LOGGED
        ]


def execute_command(
    experiment: CommandExperiment,
    substrate: Substrate,
    directory: Path,
    *,
    watch: Callable[[Any], None] = lambda message: None,
    twin_id: str = "",
) -> CommandRun:
    """Run ``experiment`` and return its records; all processes are ended, also after an error.

    A job that runs already is neither started nor ended.

    Args:
        experiment: the plan of the run.
        substrate: provides the nodes.
        directory: the directory for journals, logs and the command's own files, which is created.
        watch: receives the newest step and loss of the logs some times a second, and each fault
            that strikes.
        twin_id: the run id of the unbroken run to compare with, or ``LATER`` of
            experiment/run/run.py; "" for none.

    Raises:
        BadInput: if a fault refuses its input.
        HarnessError: if chaoskit itself failed, or the code of a fault (:class:`FaultBroken`).
        JournalFull: if ``directory`` has no room for the harness's journal.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory / "journal", "harness", role="harness")
    cluster = substrate.bare(experiment.nodes, directory, needed_directories(experiment))
    started_ns = time.monotonic_ns()  # the start of a supervisor does not count
    setup_fields = {"substrate": substrate.name, "names": cluster.nodes, "twin": twin_id}
    _write_start(journal, experiment, started_ns, setup_fields)
    follower = CommandFollower(experiment, cluster, directory, journal, substrate.undo, watch)
    runner = asyncio.Runner()
    is_over, failure = False, ""
    try:
        if experiment.running_job is None:
            _start(experiment, cluster)
        is_over = runner.run(follower.follow(started_ns / 1e9 + experiment.deadline_s))
    except BaseException as error:
        failure = (
            str(error) if isinstance(error, FaultBroken) else f"{type(error).__name__}: {error}"
        )
        raise
    finally:
        ended_ns = time.monotonic_ns()
        try:
            _end(experiment, cluster, follower, runner)
        finally:
            is_observed = follower.run_end == RunEnd.OBSERVED
            is_ok = is_observed or (is_over and set(follower.exits.values()) == {GOOD})
            _write_end(journal, follower, ended_ns, failure or cluster.why_aborted(), is_ok=is_ok)
    return load_command_run(directory, experiment)


def _end(
    experiment: CommandExperiment,
    cluster: CommandCluster,
    follower: CommandFollower,
    runner: asyncio.Runner,
) -> None:
    """End the nodes and the faults, and close the event loop.

    The end of nodes undoes most faults. In a running job, where nothing else ends, the faults end
    first.
    """
    ends = [lambda: runner.run(follower.close()), cluster.end]  # the last one is called first
    if experiment.running_job is not None:
        ends.reverse()
    with contextlib.ExitStack() as ended:
        ended.enter_context(runner)
        for end in ends:
            ended.callback(end)


def _write_end(
    journal: Journal, follower: CommandFollower, ended_ns: int, detail: str, *, is_ok: bool
) -> None:
    """Write the record of the end of the run, and of each fault that did not act."""
    follower.record_missed()
    reader = follower.reader
    log_counts: dict[str, Any] = {
        "lines": reader.lines,
        "example": reader.example,
        "odd": reader.odd,
        "unread": reader.unread,
        "unread_last": reader.unread_last,
        "drawn": reader.drawn,
    }
    journal.write(
        Event.RUN_ENDED,
        t_ns=ended_ns,
        reason=follower.run_end,
        ok=is_ok,
        detail=detail,
        exits=follower.exits,
        logs=log_counts,
    )
    journal.close(follower.run_end)


def load_command_run(directory: Path, experiment: CommandExperiment) -> CommandRun:
    """Return a run of a command from its journals alone; missing records give defaults."""
    journals = load_journals(directory / "journal")
    start_records = [record for record in journals.records if record.event == Event.STARTED]
    end_records = [record for record in journals.records if record.event == Event.RUN_ENDED]
    start_record = start_records[0] if start_records else None
    end_record = end_records[-1] if end_records else None
    newest_ns = journals.records[-1].t_ns if journals.records else 0
    log_counts: dict[str, Any] = (
        end_record["logs"] if end_record is not None else {"lines": 0, "example": "", "odd": ""}
    )
    return CommandRun(
        experiment=experiment,
        directory=directory,
        started=start_record,
        started_ns=start_record.t_ns if start_record is not None else 0,
        ended_ns=end_record.t_ns if end_record is not None else newest_ns,
        reason=str(end_record["reason"]) if end_record is not None else "",
        exits={
            node: ProcessExit(how, status) for node, (how, status) in end_record["exits"].items()
        }
        if end_record is not None
        else {},
        lines_read=log_counts["lines"],
        example=log_counts["example"],
        odd=log_counts["odd"],
        unread=log_counts.get("unread", 0),  # older records lack it
        unread_last=log_counts.get("unread_last", 0),
        drawn=log_counts.get("drawn", 0),
        harness_lost=end_record is None or end_record["reason"] == RunEnd.HARNESS,
    )


def describe_end(how: str, status: str) -> str:
    """Return in words how a command ended, to follow the command's name.

    Args:
        how: the kind of the end, such as ``exited`` or ``lost``.
        status: the exit status or the signal in words.
    """
    return {"exited": f"ended with {status}", "lost": f"ended: {status}"}.get(
        how, f"was {how} by {status}"
    )


def _write_start(
    journal: Journal,
    experiment: CommandExperiment,
    started_ns: int,
    setup_fields: Mapping[str, Any],
) -> None:
    """Write the record of the start of the run, which relates its clock to the wall clock."""
    unix_ns = time.time_ns() - (time.monotonic_ns() - started_ns)
    process_fields = {
        "run_id": uuid.uuid4().hex,
        "pid": os.getpid(),
        "ticks": start_ticks(os.getpid()),
    }
    plan_fields = {"name": experiment.name, "steps": None, "nodes": experiment.nodes, "spares": 0}
    journal.write(
        Event.STARTED,
        t_ns=started_ns,
        unix_ns=unix_ns,
        sharded=False,
        **process_fields,
        **plan_fields,
        **setup_fields,
    )


def _start(experiment: CommandExperiment, cluster: CommandCluster) -> None:
    """Start the command on each node, with its placeholders filled in and the node's own paths."""
    for node_number, node in enumerate(cluster.nodes):
        command_node = CommandNode(
            node_rank=node_number,
            nodes=experiment.nodes,
            address=cluster.host(node),
            master_addr=cluster.host(cluster.nodes[0]),
            master_port=cluster.port,
            run_dir=str(cluster.checkpoints or ""),
            disk=str(cluster.disk(node)),
            seed=experiment.seed,
            interface=cluster.interface,
        )
        # before placeholders are filled in: their paths are those of the node already
        command = [path_on_node(argument, cluster.paths) for argument in experiment.command]
        cluster.start(
            node,
            arguments(command, command_node),
            environment(command_node),
            path_on_node(experiment.working_directory, cluster.paths),
        )
