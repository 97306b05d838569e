"""Plan of an experiment with a command, checked in full before a process is started.

A training that runs already is such an experiment, too: without a command, and with a
:class:`RunningJob`.

-> stacks/command.py: how placeholders are filled in. stacks/patterns.py: the patterns for its log.
experiment/judge/command_judge.py: the checks with ``max_lost_steps`` and of a stalled run.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaoskit.errors import BadInput, name_remedy
from chaoskit.faults.base import LIVE_ROLES, Fault, draw_ranks, typed_faults
from chaoskit.faults.network.sides import Sides
from chaoskit.faults.storage.disk import CHECKPOINTS, TroubledDirectory
from chaoskit.logrule import LogRule
from chaoskit.rules import load_rules
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.command import require_command
from chaoskit.substrate.core.base import Needs
from chaoskit.typed import LimitS, require_short_names, typed_arguments

_DEADLINE_S = 300.0
_NAME_LENGTH = 40
_SETTINGS = (
    "command",
    "watch",
    "faults",
    "nodes",
    "ranks",
    "seed",
    "working_directory",
    "deadline_s",
    "stalled_s",
    "max_lost_steps",
    "name",
    "rules",
    "twin",
    "check",
)


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A training that runs already, and goes on after the run.

    Attributes:
        reference: what names it, such as ``statefulset/llama``.
        namespace: the namespace of its pods.
        observe_s: seconds for which the job is observed after the last act of a fault.
    """

    reference: str
    namespace: str
    observe_s: float


@dataclass(frozen=True, slots=True)
class CommandExperiment:
    """A run of a command on several nodes, with its faults.

    Attributes:
        name: the name that reports show.
        command: the arguments, with placeholders for values that differ between nodes.
        watch: the patterns that find steps and losses in the log.
        nodes: the number of nodes; each starts the command once.
        ranks: the number of processes with a rank, over all nodes; 0 if it is not known.
        seed: draws the ranks of roles; the command receives it, too.
        faults: the faults, each for one rank: roles that stand for several ranks are drawn already.
        working_directory: the directory in which the command is started.
        deadline_s: the time limit in seconds; a run that takes longer is ended and has failed.
        max_lost_steps: steps that the faults may cost.
        rules: log rules; the outcome reports when one fires.
        asked: the faults before roles were drawn; empty if they are not recorded.
        stalled_s: the run is ended and has failed if its log shows no step for so many seconds;
            None for no limit.
        running_job: the training that is observed in place of a command that the run starts;
            ``command`` is empty then, and ``nodes`` is the number of its pods.
    """

    name: str
    command: tuple[str, ...]
    watch: LogPatterns
    nodes: int
    ranks: int
    seed: int
    faults: tuple[Fault, ...]
    working_directory: str
    deadline_s: float
    max_lost_steps: int = 0
    rules: tuple[LogRule, ...] = ()
    asked: tuple[Fault, ...] = ()
    stalled_s: float | None = None
    running_job: RunningJob | None = None

    @property
    def job(self) -> str:
        """The command as it would be typed in a shell, or the reference of the running job."""
        return self.running_job.reference if self.running_job else shlex.join(self.command)

    @property
    def steps(self) -> int | None:
        """Always None, because only the command knows its number of steps."""
        return None

    def unbroken(self) -> CommandExperiment:
        """Return the twin: the same command without faults and rules."""
        return replace(self, name=f"{self.name} (twin)", faults=(), rules=())


@typed_arguments
def plan_command(
    command: object,
    *,
    watch: object,
    name: str = "",
    nodes: int = 1,
    ranks: int = 0,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    working_directory: str | Path = "",
    deadline_s: LimitS | None = None,
    stalled_s: LimitS | None = None,
    max_lost_steps: int = 0,
    rules: str | Path | Sequence[object] | None = None,
    **unknown: Any,
) -> CommandExperiment:
    """Check and assemble an experiment with a command, and return it; nothing is started.

    Args:
        command: a list of texts. In each, ``{node_rank}``, ``{nodes}``, ``{address}``,
            ``{master_addr}``, ``{master_port}``, ``{run_dir}``, ``{disk}`` and ``{seed}`` are
            filled in on every node.
        watch: :class:`chaoskit.stacks.LogPatterns`.
        name: the name that reports show. Default: the begin of the command.
        nodes: the number of nodes; each starts the command once.
        ranks: the number of processes that will have a rank, over all nodes; 0: at least one on
            each node.
        seed: draws the ranks of roles; the command receives it, too.
        faults: the faults that strike the run.
        working_directory: the directory in which the command is started; "" for the current one.
        deadline_s: time limit in seconds; ``math.inf`` for none. Default: five minutes.
        stalled_s: the run is ended if its log shows no step for so many seconds, counted from the
            first step; None for no limit.
        max_lost_steps: steps that may be shown again after a fault.
        rules: log rules, or a file of them. The outcome reports when one fires; nothing else
            happens.
        unknown: settings that a command does not have; each is refused.

    Raises:
        BadInput: naming field, value and remedy. Nothing was started.
    """
    if unknown:
        field = min(unknown)
        remedy = name_remedy(field, _SETTINGS)
        raise BadInput(field, unknown[field], f"a command has no such setting; {remedy}")
    arguments = require_command(command)
    if not isinstance(watch, LogPatterns):
        raise BadInput(
            "watch",
            watch,
            r'give the pattern of a step in its log: watch=LogPatterns(step=r"step (\d+)")',
        )
    if watch.rank is not None:
        remedy = "leave it out: it is for jobs that run already (chaos.attach)"
        raise BadInput("watch.rank", watch.rank, remedy)
    _require_counts(nodes=(nodes, 1), ranks=(ranks, 0), max_lost_steps=(max_lost_steps, 0))
    if deadline_s is not None and not deadline_s > 0:
        raise BadInput("deadline_s", deadline_s, "use a number of seconds above 0, or math.inf")
    _require_stalled_s(stalled_s)
    faults = typed_faults(faults)
    directory = Path(working_directory or Path.cwd()).resolve()
    if not directory.is_dir():
        raise BadInput("working_directory", str(working_directory), "name a directory that exists")
    _require_program(arguments[0], directory)
    return CommandExperiment(
        name=name or shlex.join(arguments)[:_NAME_LENGTH],
        command=arguments,
        watch=watch,
        nodes=nodes,
        ranks=ranks,
        seed=seed,
        faults=_expand(faults, nodes, ranks, seed),
        working_directory=str(directory),
        deadline_s=_DEADLINE_S if deadline_s is None else deadline_s,
        max_lost_steps=max_lost_steps,
        rules=load_rules(rules),
        asked=faults,
        stalled_s=stalled_s,
    )


def _require_counts(**counts: tuple[int, int]) -> None:
    """Raise BadInput for the first count below its least value; name -> (count, least)."""
    for field, (count, least) in counts.items():
        if count < least:
            raise BadInput(field, count, f"use a whole number, {least} or more")


def _require_stalled_s(seconds: object) -> None:
    """Raise BadInput unless the limit is None or a finite number of seconds above 0."""
    is_number = (
        isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and 0 < seconds < math.inf
    )
    if seconds is not None and not is_number:
        raise BadInput(
            "stalled_s", seconds, "use a number of seconds above 0, or leave it out for no limit"
        )


def _require_program(program: str, directory: Path) -> None:
    """Raise BadInput if the program of the command is not a file, or is not on ``PATH``."""
    if "{" in program:
        return  # filled in on each node: the harness cannot check it
    require_short_names("command", program)
    executable = directory / program if "/" in program else Path(shutil.which(program) or "")
    if not executable.is_file():
        # the program of a virtual environment that is not activated
        program_beside = Path(sys.executable).with_name(program)
        remedy = (
            f"write {program_beside}"
            if program_beside.is_file()
            else "name a program that is installed, or a path to one"
        )
        raise BadInput("command", program, remedy)


# -- faults ----------------------------------------------------------------------------------------


def _expand(faults: Sequence[Fault], nodes: int, ranks: int, seed: int) -> tuple[Fault, ...]:
    """Check the faults, and return them with a drawn rank in place of each role.

    A rank is drawn from the run's seed and the position of the fault, so that a plan can be
    repeated.

    Raises:
        BadInput: if a fault cannot be done to a command, or names a rank that does not exist.
    """
    named_ranks = [fault.rank for fault in faults if isinstance(fault.rank, int)]
    rank_count = ranks or max([nodes, *(rank + 1 for rank in named_ranks)])
    for fault in faults:
        require_possible(fault)
        fault.validate(nodes=rank_count, steps=None)
    return draw_ranks(faults, ranks or nodes, seed)


def require_possible(fault: Fault) -> None:
    """Raise BadInput, which names the remedy, if a fault cannot be done to a command."""
    if not fault.from_outside or fault.of_runtime:
        remedy = "use one that acts from outside the process, such as Kill, Hang, KillNode, FreezeNode or Cut"
        raise BadInput("faults", str(fault), f"{remedy}: a command has no hooks of chaoskit")
    require_known_target(fault)


def require_known_target(fault: Fault) -> None:
    """Raise BadInput if the moment or the target of a fault cannot be known from logs and ranks."""
    if fault.during is not None:
        raise BadInput(
            "during",
            fault.during,
            "use at_step or after_s: the recoveries of a command are not known",
        )
    if fault.at_step is not None and fault.phase != "forward":
        raise BadInput("phase", fault.phase, "leave it out: a log shows steps, not their phases")
    if fault.rank in LIVE_ROLES:
        raise BadInput(
            "rank",
            fault.rank,
            "use a number, or a role such as any or minority: a command has no shards",
        )
    if isinstance(fault, TroubledDirectory) and fault.directory == CHECKPOINTS:
        raise BadInput(
            "directory",
            fault.directory,
            "name the directory: the directories of a command are not known",
        )
    if isinstance(fault, Sides) and fault.apart_from in ("coordinator", "store"):
        raise BadInput(
            "apart_from",
            fault.apart_from,
            "use 'all', 'ranks' or a tuple of ranks: there is no coordinator",
        )


def needed_directories(experiment: CommandExperiment) -> Needs:
    """Return the directories that nodes must see: working directory, and folders of named files."""
    named_paths = [Path(argument) for argument in experiment.command if argument.startswith("/")]
    return Needs(
        tuple(path.parent for path in named_paths if path.is_file()),
        (Path(experiment.working_directory),),
    )


def moment(fault: Fault) -> str:
    """Return in words when a fault strikes a command: at a step or a time after the first step."""
    if fault.at_step is not None:
        return f"as soon as the log showed step {fault.at_step}"
    return f"{fault.after_s:g} s after the log showed a first step"
