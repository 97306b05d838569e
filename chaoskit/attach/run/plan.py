"""The plan of a run on a job that runs already, checked before anything is broken.

-> experiment/plan/command_plan.py: the same for a command. attach/run/attach.py carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from chaoskit.attach.jobs.find import FoundJob
from chaoskit.errors import BadInput
from chaoskit.experiment.plan.command_plan import (
    CommandExperiment,
    RunningJob,
    require_known_target,
)
from chaoskit.faults.base import Fault, draw_ranks, typed_faults
from chaoskit.rules import load_rules
from chaoskit.stacks import LogPatterns
from chaoskit.typed import LimitS, typed_arguments

_DEADLINE_S = 900.0
_STALLED_S = 180.0
_OBSERVE_S = 10.0


@typed_arguments
def plan_attached(
    job: FoundJob,
    ranks: Mapping[int, str],
    *,
    watch: LogPatterns,
    faults: Sequence[Fault],
    name: str = "",
    seed: int = 0,
    deadline_s: LimitS = _DEADLINE_S,
    stalled_s: LimitS = _STALLED_S,
    observe_s: float = _OBSERVE_S,
    max_lost_steps: int = 0,
    rules: str | Path | Sequence[object] | None = None,
) -> CommandExperiment:
    """Check and assemble a run on a job that runs already.

    Args:
        job: the job.
        ranks: rank -> node, as the processes of the job show them.
        watch: the patterns that find steps and losses in the log.
        faults: the faults that strike the job.
        name: the name that reports show. Default: the reference of the job.
        seed: draws the ranks of roles.
        deadline_s: seconds after which the run ends; ``math.inf`` for none.
        stalled_s: the run is ended and has failed if the log shows no step for so many seconds;
            ``math.inf`` for no limit.
        observe_s: seconds for which the job is observed after the last act of a fault.
        max_lost_steps: steps that may be shown again after a fault.
        rules: log rules, or a file of them.

    Raises:
        BadInput: naming field, value and remedy.
    """
    typed = typed_faults(faults)
    for field, seconds in (("deadline_s", deadline_s), ("stalled_s", stalled_s)):
        if not seconds > 0:
            raise BadInput(field, seconds, "use a number of seconds above 0, or math.inf")
    if not 0 <= observe_s < math.inf:
        raise BadInput("observe_s", observe_s, "use a number of seconds, 0 or more")
    if max_lost_steps < 0:
        raise BadInput("max_lost_steps", max_lost_steps, "use a whole number, 0 or more")
    return CommandExperiment(
        name=name or str(job.reference),
        command=(),
        watch=watch,
        nodes=len(job.places.places),
        ranks=len(ranks),
        seed=seed,
        faults=_with_ranks(typed, ranks, seed),
        working_directory="",
        deadline_s=deadline_s,
        max_lost_steps=max_lost_steps,
        rules=load_rules(rules),
        asked=typed,
        stalled_s=stalled_s if stalled_s < math.inf else None,
        running_job=RunningJob(str(job.reference), job.namespace, observe_s),
    )


def _with_ranks(
    faults: tuple[Fault, ...], ranks: Mapping[int, str], seed: int
) -> tuple[Fault, ...]:
    """Return the faults with a rank of the job in place of each role. Raises BadInput."""
    if not faults:
        raise BadInput("faults", (), "name one at least, such as Kill(rank=1, after_s=5)")
    for fault in faults:
        require_known_target(fault)
        if isinstance(fault.rank, int) and fault.rank not in ranks:
            existing = ", ".join(map(str, sorted(ranks)))
            raise BadInput("faults", str(fault), f"name a rank of the job: it has {existing}")
        fault.validate(nodes=max(ranks) + 1, steps=None)
    return draw_ranks(faults, len(ranks), seed)


def require_ranks(job: FoundJob, reasons: Sequence[str]) -> NoReturn:
    """Refuse a job whose processes do not show their ranks.

    Args:
        job: the job.
        reasons: why no rank was read, by node.

    Raises:
        BadInput: always.
    """
    remedy = "start its ranks by torchrun, or with RANK in the environment of each process"
    raise BadInput("job", str(job.reference), "; ".join([remedy, *reasons[:3]]))
