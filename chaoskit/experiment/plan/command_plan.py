"""What is to be run and broken, where that is a command: checked in full before a process is started."""

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
from chaoskit.faults.network.partitions import NetworkFault
from chaoskit.faults.storage.disk import CHECKPOINTS, DiskFault
from chaoskit.logrule import LogRule
from chaoskit.rules import load_rules
from chaoskit.stacks import LogPatterns
from chaoskit.stacks.command import require_command
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
class CommandExperiment:
    """One run of a command on several nodes, with its faults.

    Attributes:
        command: its arguments, with placeholders for what differs from node to node.
        ranks: processes that have a rank, over all nodes; 0 where that is not known.
        seed: draws the ranks of roles; the command is told of it.
        faults: one a rank: roles that stand for several are drawn already.
        working_directory: in which the command is started.
        deadline_s: the run is ended, and has failed, when it takes longer.
        max_lost_steps: steps that its faults may cost.
        rules: log rules that are told of when they fire.
        asked: the faults before roles were drawn; empty where that is not known.
        stalled_s: the run is ended, and has failed, when its log shows no step for so long; None for no limit.
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

    @property
    def job(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.command)

    @property
    def steps(self) -> int | None:
        """How many there will be is known to the command alone."""
        return None

    def unbroken(self) -> CommandExperiment:
        """The twin: the same command without faults."""
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
    """Check and assemble an experiment with a command.

    Args:
        command: a list of texts. In each, ``{node_rank}``, ``{nodes}``, ``{address}``, ``{master_addr}``,
            ``{master_port}``, ``{run_dir}``, ``{disk}`` and ``{seed}`` are filled in on every node.
        watch: :class:`chaoskit.stacks.LogPatterns`.
        nodes: on each of them the command is started once.
        ranks: processes that will have a rank, over all nodes; 0: one a node at least.
        working_directory: "" for the current one.
        deadline_s: default: five minutes.
        stalled_s: the run is ended when the log shows no step for so long, counted from its first step on.
        max_lost_steps: steps that may be shown again after a fault.
        rules: log rules, or a file of them; when one fires the outcome tells of it, and nothing is done.

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
            "watch", watch, r'say how its log shows steps: watch=LogPatterns(step=r"step (\d+)")'
        )
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
    for field, (value, least) in counts.items():
        if value < least:
            raise BadInput(field, value, f"use a whole number, {least} or more")


def _require_stalled_s(seconds: object) -> None:
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
    if "{" in program:
        return  # known on the node only
    require_short_names("command", program)
    found = directory / program if "/" in program else Path(shutil.which(program) or "")
    if not found.is_file():
        beside = Path(sys.executable).with_name(program)  # of an environment that is not activated
        remedy = (
            f"write {beside}"
            if beside.is_file()
            else "name a program that is installed, or a path to one"
        )
        raise BadInput("command", program, remedy)


# -- faults -------------------------------------------------------------------------------------------------------


def _expand(faults: Sequence[Fault], nodes: int, ranks: int, seed: int) -> tuple[Fault, ...]:
    """Check the faults, and draw the ranks of those that name a role from the run's seed and the fault's place."""
    named = [fault.rank for fault in faults if isinstance(fault.rank, int)]
    world = ranks or max([nodes, *(rank + 1 for rank in named)])
    for fault in faults:
        require_possible(fault)
        fault.validate(nodes=world, steps=None)
    return draw_ranks(faults, ranks or nodes, seed)


def require_possible(fault: Fault) -> None:
    """Refuse a fault that cannot be done to a command.

    Raises:
        BadInput: naming the remedy.
    """
    if not fault.from_outside or fault.of_runtime:
        remedy = "use one that needs no help from inside, such as Kill, Hang, KillNode, FreezeNode or Cut"
        raise BadInput("faults", str(fault), f"{remedy}: a command has no hooks of chaoskit")
    if fault.during is not None:
        raise BadInput(
            "during",
            fault.during,
            "use at_step or after_s: a command does not tell how it recovers",
        )
    if fault.at_step is not None and fault.phase != "forward":
        raise BadInput(
            "phase", fault.phase, "leave it out: a log tells of steps, not of their phases"
        )
    if fault.rank in LIVE_ROLES:
        raise BadInput(
            "rank",
            fault.rank,
            "use a number, or a role such as any or minority: a command has no shards",
        )
    if isinstance(fault, DiskFault) and fault.directory == CHECKPOINTS:
        raise BadInput(
            "directory",
            fault.directory,
            "name the directory: nobody knows where a command stores anything",
        )
    if isinstance(fault, NetworkFault) and fault.apart_from in ("coordinator", "store"):
        raise BadInput(
            "apart_from",
            fault.apart_from,
            "use 'all', 'ranks' or a tuple of ranks: there is no coordinator",
        )


def moment(fault: Fault) -> str:
    """When a fault strikes a command, in words."""
    if fault.at_step is not None:
        return f"as soon as the log showed step {fault.at_step}"
    return f"{fault.after_s:g} s after the log showed a first step"
