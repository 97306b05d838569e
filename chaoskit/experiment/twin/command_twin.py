"""The twin of a command: the same command, unbroken. It is known as long as the harness is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from chaoskit.errors import CommandFailed
from chaoskit.experiment.injection.command_follower import GOOD
from chaoskit.experiment.injection.ranks_found import ranks_found
from chaoskit.experiment.plan.command_inputs import (
    ENTRIES_MAX,
    Digests,
    InputFiles,
    TooManyFiles,
    differing,
    variables,
)
from chaoskit.experiment.plan.command_plan import CommandExperiment
from chaoskit.experiment.run.command_run import LOGS, CommandRun, describe_end
from chaoskit.experiment.run.legibility import uncountable
from chaoskit.experiment.run.log_ends import hints, log_ends
from chaoskit.experiment.twin.twin import Interrupted
from chaoskit.stacks.course import Course, Usual, went_back


class CommandTwin(msgspec.Struct, frozen=True):
    """What the unbroken run showed.

    Attributes:
        counts: how often the logs show each step.
        losses: the different losses that they show for it.
        run_id: which run it was.
        uncountable: why nothing can be concluded from how often its log shows steps; "" if something can.
    """

    counts: dict[int, int]
    losses: dict[int, tuple[float, ...]]
    run_id: str
    uncountable: str = ""

    @classmethod
    def of(cls, run: CommandRun) -> CommandTwin:
        """The twin that ``run`` is.

        Raises:
            Interrupted: if the training began again by itself: it would teach how often steps are shown wrongly.
            CommandFailed: if the command did not end well.
        """
        if problems := unfinished(run):
            raise _did_not_complete(run, problems[0])
        counts = Course(run.lines).counts()
        unclear = uncountable(run, Usual(counts))
        if not unclear and (told := _began_again(run)):
            remedy = "have each step shown once, in order, or do without a twin (twin=False)"
            raise Interrupted(
                f"the unbroken run of {run.experiment.job} was broken by itself: {told}; {remedy}"
            )
        return cls(counts, Course(run.lines, Usual(counts)).losses(), run.run_id, unclear)

    @property
    def usual(self) -> Usual:
        """How often each step is shown."""
        return Usual(self.counts)

    @property
    def first(self) -> int | None:
        return min(self.counts, default=None)

    @property
    def highest(self) -> int | None:
        return max(self.counts, default=None)


def _began_again(run: CommandRun) -> str:
    """Where the training began again by itself, in words; "" if it did not.

    By the log alone all steps of one rank that was started twice look like those of two ranks: the node tells.
    """
    if (back := went_back(run.lines)) is not None:
        node, highest, step = back
        return f"its log on {node} goes back from step {highest} to step {step}"
    started: set[tuple[str, int]] = set()
    for record in ranks_found(run.records):
        node, rank = record.source, record["rank"]
        shown = [
            (line.t_ns, line.step)
            for line in run.lines
            if line.node == node and line.step is not None
        ]
        before = [step for t_ns, step in shown if t_ns < record.t_ns]
        after = [step for t_ns, step in shown if t_ns >= record.t_ns]
        if (node, rank) in started and before and after and min(after) <= max(before):
            return (
                f"rank {rank} on {node} was started again, and its log goes back from step {max(before)} "
                f"to step {min(after)}"
            )
        started.add((node, rank))
    return ""


def unfinished(run: CommandRun) -> list[str]:
    """Why a command did not end well; nodes that a fault took away do not count, as long as one is left."""
    taken = taken_nodes(run)
    if run.deadline_passed:
        late = f"the run did not end within its deadline of {run.experiment.deadline_s:g} s"
        return [late, *_bad_ends(run, taken)]
    if run.has_stalled:
        stalled = f"no step was shown for {run.experiment.stalled_s:g} s (stalled_s), and the run was ended"
        return [stalled, *_bad_ends(run, taken)]
    if run.exits and taken.issuperset(run.exits):
        return ["faults took every node away"]
    return _bad_ends(run, taken)


def taken_nodes(run: CommandRun) -> set[str]:
    """The nodes that faults took away for good."""
    return {
        node
        for strike in run.injections
        if strike.target is not None and not strike.missed and strike.fault.ends_node
        for node in strike.target.struck_nodes
    }


def failed_nodes(run: CommandRun) -> list[str]:
    """Return the nodes on which the command did not end well, and was not taken away by a fault."""
    taken = taken_nodes(run)
    return [node for node in run.nodes if run.exits.get(node) != GOOD and node not in taken]


def _did_not_complete(run: CommandRun, problem: str) -> CommandFailed:
    """Return the error of an unbroken run that failed: its cause in one line, and a part of the log in notes."""
    ends = log_ends(run, failed_nodes(run))
    cause = f": {ends[0].error}" if ends and ends[0].error else ""
    log = ends[0].path if ends else run.directory / LOGS
    told = f"the unbroken run of {run.experiment.job} did not complete: {problem}{cause}; see {log}"
    error = CommandFailed("; ".join([told, *hints(run)]))
    for end in ends:
        error.add_note(str(end))
    return error


def _bad_ends(run: CommandRun, taken: set[str]) -> list[str]:
    return [
        f"the command on {node} {describe_end(*end)}"
        for node, end in sorted(run.exits.items())
        if end != GOOD and node not in taken
    ]


class CommandTwins:
    """Unbroken runs of commands that are known, each with the variables and files that it found.

    A file that a command writes is no input of this command. Which files these are is seen by looking
    before and after each run.

    Args:
        without: the directory of the runs themselves, in which no input lies.
    """

    def __init__(self, without: Path) -> None:
        self._inputs = InputFiles(without)
        self._twins: dict[str, list[tuple[CommandTwin, Digests]]] = {}
        self._written: dict[str, set[str]] = {}
        self._crowded: set[str] = (
            set()
        )  # directories of which stderr has said that they hold too many files

    def get(self, experiment: CommandExperiment) -> CommandTwin | None:
        """Return the twin of an experiment that finds the same variables and files, if it is known."""
        try:
            files = self._inputs.look(experiment)
        except TooManyFiles:
            self._tell_crowded(experiment.working_directory)
            return None
        key = _key(experiment)
        written = self._written.get(key, set())
        twins = self._twins.get(key, [])
        return next((twin for twin, was in twins if not differing(was, files) - written), None)

    def put(self, experiment: CommandExperiment, twin: CommandTwin) -> None:
        """Keep a twin that has just been run; one whose files are too many to look at is not used again."""
        with suppress(TooManyFiles):
            self._twins.setdefault(_key(experiment), []).append(
                (twin, self._inputs.look(experiment))
            )

    @contextmanager
    def noting_files(self, experiment: CommandExperiment) -> Iterator[None]:
        """Note which files the command writes that runs meanwhile."""
        try:
            before = self._inputs.look(experiment)
        except TooManyFiles:
            yield
            return
        yield
        with suppress(TooManyFiles):
            written = differing(before, self._inputs.look(experiment))
            self._written.setdefault(_key(experiment), set()).update(written)

    def _tell_crowded(self, directory: str) -> None:
        """Say once on stderr that the unbroken run of a command serves one test only."""
        if directory in self._crowded:
            return
        self._crowded.add(directory)
        sys.stderr.write(
            f"chaoskit: a command in {directory} may read more than {ENTRIES_MAX:,} files, so its unbroken run is run "
            "again for each test: name a smaller working_directory\n"
        )


def _key(experiment: CommandExperiment) -> str:
    """Equal for experiments whose twins can only differ by files."""
    settings = (
        experiment.command,
        experiment.watch,
        experiment.nodes,
        experiment.seed,
        experiment.working_directory,
    )
    return repr((settings, variables()))
