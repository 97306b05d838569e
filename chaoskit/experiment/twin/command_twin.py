"""The twin of a command: an unbroken run of the same command, cached as long as the harness
exists.

The twin of a running job is the unbroken run of a second job: attach/twin/.

-> experiment/harness.py: when a twin is run, and run again once. experiment/plan/command_inputs.py:
files and variables whose change makes it useless. experiment/judge/command_judge.py compares with
it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
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
from chaoskit.experiment.run.disruptions import taken_in_words
from chaoskit.experiment.run.legibility import why_uncountable
from chaoskit.experiment.run.log_ends import hints, log_ends
from chaoskit.experiment.run.running_job import why_standing
from chaoskit.experiment.twin.twin import Interrupted
from chaoskit.stacks.course import Course, Usual, went_back
from chaoskit.stacks.log import CommandLogLine


class CommandTwin(msgspec.Struct, frozen=True):
    """The result of the unbroken run of a command.

    Attributes:
        counts: step -> how often the logs show it.
        losses: step -> the different losses that the logs show for it; steps without one are left
            out.
        run_id: the id of the run.
        uncountable: the reason why nothing can be concluded from these counts; "" if they can be
            used.
        failure: the reason why a second job did not show the steps that it should; "" if it did.
            Nothing is compared with it then.
    """

    counts: dict[int, int]
    losses: dict[int, tuple[float, ...]]
    run_id: str
    uncountable: str = ""
    failure: str = ""

    @classmethod
    def of(cls, run: CommandRun) -> CommandTwin:
        """Return the twin that follows from an unbroken run.

        Raises:
            Interrupted: if the training began again by itself, so that the counts of steps are
                wrong.
            CommandFailed: if the command did not end well.
        """
        if run.disturbing_pods:
            raise Interrupted(
                f"the unbroken run of {run.experiment.job} was disturbed without a fault: "
                f"{taken_in_words(run.disturbing_pods[0])}"
            )
        if problems := unfinished(run):
            raise _failure_of(run, problems[0])
        counts = Course(run.lines).counts()
        uncountable_reason = why_uncountable(run, Usual(counts))
        if not uncountable_reason and (problem := _restart_of(run)):
            remedy = "print each step once, in order, or run without a twin (twin=False)"
            raise Interrupted(
                f"the unbroken run of {run.experiment.job} was disturbed without a fault: {problem}; {remedy}"
            )
        return cls(
            counts, Course(run.lines, Usual(counts)).losses(), run.run_id, uncountable_reason
        )

    def observed_part(self, lines: Iterable[CommandLogLine]) -> CommandTwin:
        """Return the part of the twin to compare a running job with, which is not observed whole.

        It begins and ends with a step that the job's log shows as often as the twin's: the logs of
        some pods begin later than others, or end earlier. It is empty if the twin has failed.

        Args:
            lines: the lines of the job's log.
        """
        shown_counts = Counter(line.step for line in lines if line.step is not None)
        whole_steps = [step for step, count in self.counts.items() if shown_counts[step] >= count]
        if self.failure or not whole_steps:
            return msgspec.structs.replace(self, counts={}, losses={})
        observed = range(min(whole_steps), max(whole_steps) + 1)
        return msgspec.structs.replace(
            self,
            counts={step: count for step, count in self.counts.items() if step in observed},
            losses={step: losses for step, losses in self.losses.items() if step in observed},
        )

    @property
    def usual(self) -> Usual:
        """The usual number of times that each step is shown."""
        return Usual(self.counts)

    @property
    def first(self) -> int | None:
        """The first step in the logs, or None."""
        return min(self.counts, default=None)

    @property
    def highest(self) -> int | None:
        """The last step in the logs, or None."""
        return max(self.counts, default=None)


def _restart_of(run: CommandRun) -> str:
    """Return in words where the training began again by itself; "" if it did not.

    In the log alone, one rank that was started twice looks like two ranks. The node's records tell
    them apart.
    """
    if (step_back := went_back(run.lines)) is not None:
        node, highest, step = step_back
        return f"its log on {node} goes back from step {highest} to step {step}"
    started_ranks: set[tuple[str, int]] = set()
    for record in ranks_found(run.records):
        node, rank = record.source, record["rank"]
        shown_steps = [
            (line.t_ns, line.step)
            for line in run.lines
            if line.node == node and line.step is not None
        ]
        steps_before = [step for t_ns, step in shown_steps if t_ns < record.t_ns]
        steps_after = [step for t_ns, step in shown_steps if t_ns >= record.t_ns]
        if (
            (node, rank) in started_ranks
            and steps_before
            and steps_after
            and min(steps_after) <= max(steps_before)
        ):
            return (
                f"rank {rank} on {node} was started again, and its log goes back from step {max(steps_before)} "
                f"to step {min(steps_after)}"
            )
        started_ranks.add((node, rank))
    return ""


def unfinished(run: CommandRun) -> list[str]:
    """Return why a command did not end well; an empty list if it did.

    Nodes that a fault took away do not count, as long as one node is left. Ends that the harness
    did not record do not count either: they make the journals incomplete.
    """
    if run.experiment.running_job is not None:
        problem = why_standing(run)
        return [problem] if problem else []
    gone_nodes = taken_nodes(run)
    if run.deadline_passed:
        late_in_words = (
            f"the run did not end within its deadline of {run.experiment.deadline_s:g} s"
        )
        return [late_in_words, *_bad_ends(run, gone_nodes)]
    if run.has_stalled:
        stalled_in_words = f"no step was shown for {run.experiment.stalled_s:g} s (stalled_s), and the run was ended"
        return [stalled_in_words, *_bad_ends(run, gone_nodes)]
    if run.exits and gone_nodes.issuperset(run.exits):
        return ["faults took every node away"]
    return _bad_ends(run, gone_nodes)


def taken_nodes(run: CommandRun) -> set[str]:
    """Return the nodes that faults took away for good.

    A place of a running job is none of them: another pod takes it.
    """
    if run.experiment.running_job is not None:
        return set()
    return {
        node
        for strike in run.injections
        if strike.target is not None and not strike.missed and strike.fault.ends_node
        for node in strike.target.struck_nodes
    }


def failed_nodes(run: CommandRun) -> list[str]:
    """Return the nodes that no fault took away and on which the command did not end well.

    A node without a recorded end of its command is among them.
    """
    gone_nodes = taken_nodes(run)
    return [node for node in run.nodes if run.exits.get(node) != GOOD and node not in gone_nodes]


def _failure_of(run: CommandRun, problem: str) -> CommandFailed:
    """Return the error of an unbroken run that failed, with its cause and a part of the log."""
    ends = log_ends(run, failed_nodes(run))
    cause = f": {ends[0].error}" if ends and ends[0].error else ""
    log = ends[0].path if ends else run.directory / LOGS
    message = (
        f"the unbroken run of {run.experiment.job} did not complete: {problem}{cause}; see {log}"
    )
    error = CommandFailed("; ".join([message, *hints(run)]))
    for end in ends:
        error.add_note(str(end))
    return error


def _bad_ends(run: CommandRun, gone_nodes: set[str]) -> list[str]:
    """Return in words each bad end of a command on a node that no fault took away."""
    return [
        f"the command on {node} {describe_end(*end)}"
        for node, end in sorted(run.exits.items())
        if end != GOOD and node not in gone_nodes
    ]


class CommandTwins:
    """A cache of unbroken runs of commands, each with the variables and files that were its input.

    A file that a command writes is not an input of this command. The cache finds these files by
    digests before and after each run.

    Args:
        without: the directory of the runs themselves, which holds no inputs.
    """

    def __init__(self, without: Path) -> None:
        self._inputs = InputFiles(without)
        self._twins: dict[str, list[tuple[CommandTwin, Digests]]] = {}
        self._written_paths: dict[str, set[str]] = {}
        # directories with too many files, for which a warning was printed
        self._crowded_directories: set[str] = set()

    def get(self, experiment: CommandExperiment) -> CommandTwin | None:
        """Return the twin of an experiment with the same variables and files, or None.

        Too many files give None and a warning on stderr.
        """
        try:
            files = self._inputs.look(experiment)
        except TooManyFiles:
            self._warn_crowded(experiment.working_directory)
            return None
        key = _key(experiment)
        written_paths = self._written_paths.get(key, set())
        twins = self._twins.get(key, [])
        return next(
            (
                twin
                for twin, twin_files in twins
                if not differing(twin_files, files) - written_paths
            ),
            None,
        )

    def put(self, experiment: CommandExperiment, twin: CommandTwin) -> None:
        """Store a twin that has just been run, unless its files are too many to compare."""
        with suppress(TooManyFiles):
            self._twins.setdefault(_key(experiment), []).append(
                (twin, self._inputs.look(experiment))
            )

    @contextmanager
    def recording_files(self, experiment: CommandExperiment) -> Iterator[None]:
        """Record the files that change during a ``with`` block as written by the command.

        Nothing is recorded if there are too many files, or the block raises an error.
        """
        try:
            files_before = self._inputs.look(experiment)
        except TooManyFiles:
            yield
            return
        yield
        with suppress(TooManyFiles):
            written_paths = differing(files_before, self._inputs.look(experiment))
            self._written_paths.setdefault(_key(experiment), set()).update(written_paths)

    def _warn_crowded(self, directory: str) -> None:
        """Warn on stderr, once for a directory, that its unbroken runs are not reused."""
        if directory in self._crowded_directories:
            return
        self._crowded_directories.add(directory)
        sys.stderr.write(
            f"chaoskit: a command in {directory} may read more than {ENTRIES_MAX:,} files, so its unbroken run is run "
            "again for each test: name a smaller working_directory\n"
        )


def _key(experiment: CommandExperiment) -> str:
    """Return a text that is equal for experiments with twins that can differ only by files."""
    settings = (
        experiment.command,
        experiment.watch,
        experiment.nodes,
        experiment.seed,
        experiment.working_directory,
    )
    return repr((settings, variables()))
