"""The plan of a run on a job that runs already, checked before anything is broken.

-> experiment/plan/command_plan.py: the same for a command. attach/run/attach.py carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaoskit.attach.guards.hand_choice import hand_of
from chaoskit.attach.hands.hand_container import HandMeans
from chaoskit.attach.jobs.find import FoundJob
from chaoskit.errors import BadInput, closest_name, name_remedy
from chaoskit.experiment.plan.command_plan import (
    CommandExperiment,
    RunningJob,
    require_known_target,
)
from chaoskit.faults.base import Fault, draw_ranks, typed_faults
from chaoskit.faults.network.sides import named_ranks
from chaoskit.logrule import LogRule
from chaoskit.rules import load_rules
from chaoskit.stacks import LogPatterns
from chaoskit.typed import LimitS, typed_arguments

_DEADLINE_S = 900.0
_STALLED_S = 180.0
_OBSERVE_S = 10.0
_SHOWN_NODES = 20  # names in an error
_TWIN_DEADLINE_S = 3600.0
_SETTINGS = (
    *("job", "watch", "faults", "image", "exec_hands", "namespace", "context", "container"),
    *("limits", "check"),
    *("name", "seed", "deadline_s", "stalled_s", "observe_s", "max_lost_steps", "rules"),
    *("twin", "twin_deadline_s", "twin_steps"),
)


@dataclass(frozen=True, slots=True)
class AttachSettings:
    """The settings of a run on a job that runs already, besides its faults.

    Attributes:
        name: the name that reports show; "" for the reference of the job.
        seed: draws the ranks of roles.
        deadline_s: seconds after which the run ends; infinity for no limit.
        stalled_s: the run is ended and has failed if the log shows no step for so many seconds;
            None for no limit.
        observe_s: seconds for which the job is observed after the last act of a fault.
        max_lost_steps: steps that may be shown again after a fault.
        rules: log rules.
        twin_deadline_s: seconds after which the unbroken run of a second job ends.
        twin_steps: number of the step up to which a second job trains at least.
    """

    name: str
    seed: int
    deadline_s: float
    stalled_s: float | None
    observe_s: float
    max_lost_steps: int
    rules: tuple[LogRule, ...]
    twin_deadline_s: float
    twin_steps: int


@typed_arguments
def attach_settings(
    *,
    name: str = "",
    seed: int = 0,
    deadline_s: LimitS = _DEADLINE_S,
    stalled_s: LimitS = _STALLED_S,
    observe_s: float = _OBSERVE_S,
    max_lost_steps: int = 0,
    rules: str | Path | Sequence[object] | None = None,
    twin_deadline_s: LimitS = _TWIN_DEADLINE_S,
    twin_steps: int = 0,
    **unknown: Any,
) -> AttachSettings:
    """Check the settings of a run, and return them.

    Args:
        name: the name that reports show. Default: the reference of the job.
        seed: draws the ranks of roles.
        deadline_s: seconds after which the run ends; ``math.inf`` for none.
        stalled_s: the run is ended and has failed if the log shows no step for so many seconds;
            ``math.inf`` for no limit.
        observe_s: seconds for which the job is observed after the last act of a fault.
        max_lost_steps: steps that may be shown again after a fault.
        rules: log rules, or a file of them.
        twin_deadline_s: seconds after which the unbroken run of a second job (``twin``) ends, and
            losses are not compared; ``math.inf`` for none.
        twin_steps: number of the step up to which a second job trains at least. Runs of the same
            session compare with its result again, as long as the job has not come further.
        unknown: settings that such a run does not have; each is refused.

    Raises:
        BadInput: naming field, value and remedy.
    """
    if unknown:
        field = min(unknown)
        remedy = name_remedy(field, _SETTINGS)
        raise BadInput(field, unknown[field], f"chaos.attach has no such argument; {remedy}")
    limits_s = {
        "deadline_s": deadline_s,
        "stalled_s": stalled_s,
        "twin_deadline_s": twin_deadline_s,
    }
    for field, seconds in limits_s.items():
        if not seconds > 0:
            raise BadInput(field, seconds, "use a number of seconds above 0, or math.inf")
    if not 0 <= observe_s < math.inf:
        raise BadInput("observe_s", observe_s, "use a number of seconds, 0 or more")
    for field, steps in (("max_lost_steps", max_lost_steps), ("twin_steps", twin_steps)):
        if steps < 0:
            raise BadInput(field, steps, "use a whole number, 0 or more")
    limit_s = stalled_s if stalled_s < math.inf else None
    return AttachSettings(
        name,
        seed,
        deadline_s,
        limit_s,
        observe_s,
        max_lost_steps,
        load_rules(rules),
        twin_deadline_s,
        twin_steps,
    )


def require_faults(faults: Sequence[Fault], means: HandMeans) -> tuple[Fault, ...]:
    """Return faults that hands can do. Raises BadInput for any other one, and if there is none."""
    typed = typed_faults(faults)
    if not typed:
        raise BadInput("faults", (), "name one at least, such as Kill(rank=1, after_s=5)")
    for fault in typed:
        hand_of(fault, means)
        require_known_target(fault)
        _require_target(fault)
    return typed


def _require_target(fault: Fault) -> None:
    """Raise BadInput unless a fault names a rank, or a node that it strikes as a whole."""
    if bool(fault.node) == (fault.rank != ""):
        remedy = "name a rank, or the node of a pod: rank=1 or node='llama-1'"
        raise BadInput("faults", str(fault), f"{remedy}, and not both")
    if fault.node and not fault.whole_node:
        remedy = "name a rank, or use KillNode, KillContainer, FreezeNode or Cut"
        why = f"{fault.kind} strikes one process, and node= does not say which"
        raise BadInput("faults", str(fault), f"{remedy}: {why}")


def require_nodes(job: FoundJob, faults: Sequence[Fault]) -> None:
    """Raise BadInput if a fault names a node that the job does not have."""
    nodes = [key.node_name for key in sorted(job.containers)]
    for fault in faults:
        if fault.node and fault.node not in nodes:
            closest = closest_name(fault.node, nodes)
            remedy = f"write {closest}" if closest else "name a node of the job"
            more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
            shown = f"{', '.join(nodes[:_SHOWN_NODES])}{more}"
            raise BadInput("faults", str(fault), f"{remedy}: {job.reference} has {shown}")


def plan_attached(
    job: FoundJob,
    ranks: Mapping[int, str],
    patterns: LogPatterns,
    faults: tuple[Fault, ...],
    settings: AttachSettings,
) -> CommandExperiment:
    """Assemble a run on a job that runs already.

    Args:
        job: the job.
        ranks: rank -> node, as the processes of the job show them; empty if none does, and no
            fault needs them.
        patterns: the patterns that find steps and losses in the log.
        faults: the faults that strike the job, of :func:`require_faults`.
        settings: the other settings.

    Raises:
        BadInput: if a fault names a rank that the job does not have.
    """
    return CommandExperiment(
        name=settings.name or str(job.reference),
        command=(),
        watch=patterns,
        nodes=len(job.containers),
        ranks=len(ranks),
        seed=settings.seed,
        faults=_with_ranks(job, faults, ranks, settings.seed),
        working_directory="",
        deadline_s=settings.deadline_s,
        max_lost_steps=settings.max_lost_steps,
        rules=settings.rules,
        asked=faults,
        stalled_s=settings.stalled_s,
        running_job=RunningJob(str(job.reference), job.namespace, settings.observe_s),
    )


def _with_ranks(
    job: FoundJob, faults: tuple[Fault, ...], ranks: Mapping[int, str], seed: int
) -> tuple[Fault, ...]:
    """Return the faults with a rank of the job in place of each role. Raises BadInput."""
    # of a command, each rank counts as a node
    count = max(len(job.containers), 1 + max(ranks, default=-1))
    for fault in faults:
        if not set(named_ranks(fault)) <= ranks.keys():
            existing = ", ".join(map(str, sorted(ranks))) or "none that is known"
            raise BadInput("faults", str(fault), f"name ranks of the job: it has {existing}")
        # the checks of the other fields; the node itself was checked before
        by_rank = replace(fault, node="", rank="any") if fault.node else fault
        by_rank.validate(nodes=count, steps=None)
    return draw_ranks(faults, len(ranks), seed)


def needs_ranks(faults: Sequence[Fault]) -> bool:
    """Return whether a fault needs the ranks of the job: it names a rank or a role."""
    return any(not fault.node or named_ranks(fault) for fault in faults)


def without_ranks(job: FoundJob, reasons: Sequence[str]) -> BadInput:
    """Return the error for a job whose processes do not show their ranks, if faults need them.

    Args:
        job: the job.
        reasons: why no rank was read, by node.
    """
    node = min((key.node_name for key in job.containers), default="")
    remedy = (
        "start its ranks by torchrun, or with RANK in the environment of each process; "
        "or give watch the pattern of a rank, if its logs show ranks; "
        f"or name nodes in faults of whole nodes, such as KillNode(node={node!r}, after_s=5)"
    )
    return BadInput("job", str(job.reference), "; ".join([remedy, *reasons[:3]]))
