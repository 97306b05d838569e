"""Many faults at random moments, the same ones for the same seed."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TypeVar

from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault
from chaoskit.typed import typed_arguments

AnyFault = TypeVar("AnyFault", bound=Fault)

#: More faults than a run can take; a list of so many is a slip of the keyboard, and its memory is not taken.
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
    """``fault`` again and again, as machines fail: at exponentially distributed distances (a Poisson process).

        faults=at_rate(Kill(rank="any"), mtbf_steps=50, steps=1000)

    Args:
        fault: gives everything but the moment.
        mtbf_steps: mean distance in steps, up to step ``steps``; the faults get ``at_step``.
        mtbf_s: mean distance in seconds, up to ``seconds`` after the first committed step; the faults get ``after_s``.
        seed: of the distances.

    Raises:
        BadInput: naming the argument that is missing, too much or not above 0, or by which there were over 100,000
            faults.
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
            replace(fault, at_step=int(moment), after_s=None, during=None) for moment in moments
        ]
    return [replace(fault, at_step=None, after_s=moment, during=None) for moment in moments]


def _moments(mean: float, end: float, chance: Random) -> list[float]:
    moments, at = [], chance.expovariate(1 / mean)
    while at < end:
        moments.append(at)
        at += chance.expovariate(1 / mean)
    return moments
