"""Runs one experiment with a command: starts it on every node, follows it while it is broken, ends everything."""

from __future__ import annotations

import asyncio
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
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.faults.target import Exit
from chaoskit.journal import FileCoverage, Journal, Journals, Record, load_journals
from chaoskit.process.linux import start_ticks
from chaoskit.runlog.injected import InjectionRecord, injections
from chaoskit.stacks.command import Place, arguments, environment
from chaoskit.stacks.log import Line
from chaoskit.substrate.core.base import CommandCluster, Needs, Substrate
from chaoskit.vocabulary import Event, RunEnd

#: Below a run's directory: what ``{run_dir}`` names.
STATE = "state"
#: Below a run's directory: what the commands print, by node.
LOGS = "log"


@dataclass
class CommandRun:
    """What a run left behind, before it is judged. All times are CLOCK_MONOTONIC in ns.

    Attributes:
        started: the harness's word on the begin of the run; None where that is missing.
        reason: why the run was over, of :class:`chaoskit.vocabulary.RunEnd`; "" where that is missing.
        exits: how the command ended, by node; without those that the harness ended at the deadline, or stalled.
        lines_read: of all logs; example: the first that shows no step; odd: what a pattern took for a number.
        unread: how many lines show the number of a step in a form that cannot be read.
        unread_last: how many of these came after the last line whose step was read.
        drawn: how many lines with a step were drawn over by the next line.
        harness_lost: it wrote no end, or failed: what the run would have shown is not known.
    """

    experiment: CommandExperiment
    directory: Path
    started: Record | None
    started_ns: int
    ended_ns: int
    reason: str
    exits: dict[str, Exit]
    lines_read: int
    example: str
    odd: str
    unread: int
    unread_last: int
    drawn: int
    harness_lost: bool = False

    @property
    def deadline_passed(self) -> bool:
        """Return whether the run was ended because it took too long."""
        return self.reason == RunEnd.DEADLINE

    @property
    def has_stalled(self) -> bool:
        """Return whether the run was ended because its log showed no step for too long."""
        return self.reason == RunEnd.STALLED

    @property
    def substrate(self) -> str:
        """Where its nodes came from, by name; "" where that is not known."""
        return str(self.started["substrate"]) if self.started is not None else ""

    @property
    def run_id(self) -> str:
        """Which run it is; "" where that is not known."""
        return str(self.started["run_id"]) if self.started is not None else ""

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Its nodes, by number; where the harness does not name them, those that have written anything."""
        if self.started is not None:
            return tuple(self.started["names"])
        written = [
            file.source
            for file in self.coverage.values()
            if any(one.role == "warden" for one in file.writers)
        ]
        return tuple(sorted({*written, *self.exits}))

    @cached_property
    def commands(self) -> dict[str, Record]:
        """What each node says of the command that it started."""
        return {
            record.source: record
            for record in self.records
            if record.event == Event.COMMAND_STARTED
        }

    @cached_property
    def journals(self) -> Journals:
        """What all processes wrote down."""
        return load_journals(self.directory / "journal")

    @cached_property
    def records(self) -> list[Record]:
        """Every journal record, by time."""
        return self.journals.records

    @cached_property
    def injections(self) -> list[InjectionRecord]:
        """What came of each planned fault."""
        return injections(self.experiment.faults, self.records)

    @property
    def coverage(self) -> Mapping[str, FileCoverage]:
        """How much of each journal could be read, by source: what is missing cannot be judged."""
        return self.journals.files

    @cached_property
    def lines(self) -> list[Line]:
        """What the logs show, from the harness's journal, in the order in which it was read."""
        return [
            Line(record.t_ns, record["node"], record["step"], record["loss"])
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
    """Run ``experiment`` and leave nothing of it running, whatever happens.

    Args:
        directory: for journals, logs and what the command itself keeps; created.
        twin_id: run id of the unbroken run with which it will be compared; "" for none.
        watch: is shown what the logs show, some times a second.

    Raises:
        HarnessError: if chaoskit itself failed.
    """
    directory = directory.resolve()
    (directory / STATE).mkdir(parents=True, exist_ok=True)
    journal = Journal(directory / "journal", "harness", role="harness")
    cluster = substrate.bare(experiment.nodes, directory, _needs(experiment))
    started_ns = time.monotonic_ns()  # what a cold supervisor takes does not count
    told = {"substrate": substrate.name, "names": cluster.nodes, "twin": twin_id}
    _write_start(journal, experiment, started_ns, told)
    follower = CommandFollower(experiment, cluster, directory, journal, substrate.undo, watch)
    runner = asyncio.Runner()
    over, failure = False, ""
    try:
        _start(experiment, cluster, directory / STATE)
        over = runner.run(follower.follow(started_ns / 1e9 + experiment.deadline_s))
    except BaseException as error:
        failure = (
            str(error) if isinstance(error, FaultBroken) else f"{type(error).__name__}: {error}"
        )
        raise
    finally:
        ended_ns = time.monotonic_ns()
        try:
            cluster.end()
        finally:
            try:
                with runner:
                    runner.run(follower.close())
            finally:
                follower.tell_missed()
                ok = over and set(follower.exits.values()) == {GOOD}
                reader = follower.reader
                logs = {"lines": reader.lines, "example": reader.example, "odd": reader.odd}
                logs |= {
                    "unread": reader.unread,
                    "unread_last": reader.unread_last,
                    "drawn": reader.drawn,
                }
                end: dict[str, Any] = {
                    "ok": ok,
                    "detail": failure,
                    "exits": follower.exits,
                    "logs": logs,
                }
                journal.write(Event.RUN_ENDED, t_ns=ended_ns, reason=follower.run_end, **end)
                journal.close(follower.run_end)
    return load_command_run(directory, experiment)


def load_command_run(directory: Path, experiment: CommandExperiment) -> CommandRun:
    """A run as its journals tell it."""
    journals = load_journals(directory / "journal")
    started = [record for record in journals.records if record.event == Event.STARTED]
    ended = [record for record in journals.records if record.event == Event.RUN_ENDED]
    begun = started[0] if started else None
    last = ended[-1] if ended else None
    newest_ns = journals.records[-1].t_ns if journals.records else 0
    logs: dict[str, Any] = (
        last["logs"] if last is not None else {"lines": 0, "example": "", "odd": ""}
    )
    return CommandRun(
        experiment=experiment,
        directory=directory,
        started=begun,
        started_ns=begun.t_ns if begun is not None else 0,
        ended_ns=last.t_ns if last is not None else newest_ns,
        reason=str(last["reason"]) if last is not None else "",
        exits={node: Exit(how, status) for node, (how, status) in last["exits"].items()}
        if last is not None
        else {},
        lines_read=logs["lines"],
        example=logs["example"],
        odd=logs["odd"],
        unread=logs.get("unread", 0),  # older records lack it
        unread_last=logs.get("unread_last", 0),
        drawn=logs.get("drawn", 0),
        harness_lost=last is None or last["reason"] == RunEnd.HARNESS,
    )


def describe_end(how: str, status: str) -> str:
    """How a command ended, in words that follow its name."""
    return {"exited": f"ended with {status}", "lost": f"ended: {status}"}.get(
        how, f"was {how} by {status}"
    )


def _write_start(
    journal: Journal, experiment: CommandExperiment, started_ns: int, of_command: Mapping[str, Any]
) -> None:
    unix_ns = time.time_ns() - (time.monotonic_ns() - started_ns)
    process = {"run_id": uuid.uuid4().hex, "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    what = {"name": experiment.name, "steps": None, "nodes": experiment.nodes, "spares": 0}
    journal.write(
        Event.STARTED,
        t_ns=started_ns,
        unix_ns=unix_ns,
        sharded=False,
        **process,
        **what,
        **of_command,
    )


def _needs(experiment: CommandExperiment) -> Needs:
    """The working directory, and those of the files that the command names."""
    named = [Path(argument) for argument in experiment.command if argument.startswith("/")]
    return Needs(
        tuple(path.parent for path in named if path.is_file()),
        (Path(experiment.working_directory),),
    )


def _start(experiment: CommandExperiment, cluster: CommandCluster, state: Path) -> None:
    for number, node in enumerate(cluster.nodes):
        place = Place(
            node_rank=number,
            nodes=experiment.nodes,
            address=cluster.host(node),
            master_addr=cluster.host(cluster.nodes[0]),
            master_port=cluster.port,
            run_dir=str(state),
            disk=str(cluster.disk(node)),
            seed=experiment.seed,
            interface=cluster.interface,
        )
        command = arguments(experiment.command, place)
        cluster.start(
            node, command, environment(cluster.environment, place), experiment.working_directory
        )
