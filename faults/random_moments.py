"""Draw many faults at random moments, reproducibly from a seed."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TypeVar

from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault
from chaoskit.typed import typed_arguments

AnyFault = TypeVar("AnyFault", bound=Fault)

#: Most faults of a list. A run cannot take so many: a longer list is a typing error, and is not
#: built.
FAULTS_MAX = 100_000


@typed_arguments
def at_rate(
    fault: AnyFault,
    *,
    mtbf_steps: float | None = None,
    steps: int | None = None,
    mtbf_s: float | None = None,
    seconds: float | None = None,
    seed: int = 0,
) -> list[AnyFault]:
    """Return copies of ``fault`` at random moments, with exponentially distributed distances.

    Machines fail like this. Give either ``mtbf_steps`` and ``steps``, or ``mtbf_s`` and
    ``seconds``. The list is in the order of the moments. It is empty if the first one is due after
    the end.

        faults=at_rate(Kill(rank="any"), mtbf_steps=50, steps=1000)

    Args:
        fault: template that gives all fields but the moment.
        mtbf_steps: mean distance in steps; the faults get ``at_step``.
        steps: number of steps of the run, below which all moments are.
        mtbf_s: mean distance in seconds; the faults get ``after_s``.
        seconds: seconds after the first committed step, below which all moments are.
        seed: seed of the distances.

    Raises:
        BadInput: naming the argument that is missing, superfluous or not above 0, or that would
            give over 100,000 faults.
    """
    if (mtbf_steps is None) == (mtbf_s is None):
        raise BadInput(
            "mtbf_steps", mtbf_steps, "give either mtbf_steps and steps, or mtbf_s and seconds"
        )
    mean, mean_name = (mtbf_steps, "mtbf_steps") if mtbf_s is None else (mtbf_s, "mtbf_s")
    end, end_name = (steps, "steps") if mtbf_s is None else (seconds, "seconds")
    surplus, surplus_name = (seconds, "seconds") if mtbf_s is None else (steps, "steps")
    if surplus is not None:
        raise BadInput(surplus_name, surplus, f"leave it out: {mean_name} goes with {end_name}")
    if mean is None or not 0 < mean < math.inf:
        raise BadInput(mean_name, mean, "use a number above 0")
    if end is None or not 0 < end < math.inf:
        raise BadInput(end_name, end, "use a number above 0")
    if end / mean > FAULTS_MAX:
        raise BadInput(
            mean_name, mean, f"use {end / FAULTS_MAX:g} or more: {FAULTS_MAX} faults are the most"
        )
    moments = _moments(mean, end, Random(seed))
    if mtbf_s is None:
        return [
            replace(fault, at_step=int(moment_at), after_s=None, during=None)
            for moment_at in moments
        ]
    return [replace(fault, at_step=None, after_s=moment_at, during=None) for moment_at in moments]


def _moments(mean: float, end: float, chance: Random) -> list[float]:
    """Return moments below ``end`` with exponentially distributed distances of this mean."""
    moments = []
    moment_at = chance.expovariate(1 / mean)
    while moment_at < end:
        moments.append(moment_at)
        moment_at += chance.expovariate(1 / mean)
    return moments
