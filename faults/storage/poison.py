"""Fault ``PoisonSnapshot``: a state that is not finite is committed.

-> runtime/injection/numbers.py writes the NaN in the worker and counts it.
-> checkpoint/memory/tier.py: why a copy of that state has no seal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from chaoskit.errors import BadInput
from chaoskit.faults import incidents
from chaoskit.faults.base import Fault
from chaoskit.faults.evidence import Evidence
from chaoskit.faults.incidents import IncidentKind
from chaoskit.faults.target import Target
from chaoskit.vocabulary import FAILED_CAUSES

WHERES = ("weight", "optimizer")


@dataclass(frozen=True, kw_only=True)
class PoisonSnapshot(Fault):
    """Write one NaN into the state that a step commits on one rank, before it is copied anywhere.

    No check of gradients can find it: the step was sound, and the next one has not begun.

    Args:
        parameter: name of a model parameter, as in ``model.named_parameters()``.
        where: ``weight``, or ``optimizer``: a tensor of the optimizer's state for this parameter.
        key: for ``optimizer``, name of the state, such as Adam's ``exp_avg``.
    """

    parameter: str
    where: str = "weight"
    key: str = "exp_avg"

    family: ClassVar[str] = "checkpoint"
    of_runtime: ClassVar[bool] = True
    # the job's own code may fail on it
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES | {"nonfinite", "corrupt"}
    effect: ClassVar[str] = "the state that one rank commits, and is about to copy, is not finite"
    evidence: ClassVar[str] = (
        "the tensor is counted for values that are not finite, before and after"
    )
    stands_for: ClassVar[str] = (
        "silent data corruption in an update, which checkpoints would keep for ever"
    )
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CORRUPTION,)
    impact: ClassVar[str] = (
        "no copy of it is published in any tier; the next step finds the rank, which is replaced"
    )
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "parameter": "head.weight"}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"where": where} for where in WHERES)
    undo: ClassVar[str] = (
        "nothing outside the process was changed; the number stays wrong until its rank is replaced"
    )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.where not in WHERES:
            raise BadInput("where", self.where, f"use one of {', '.join(WHERES)}")
        if not self.parameter:
            raise BadInput("parameter", self.parameter, "use the name of a parameter of the model")
        if self.during in ("regroup", "restore"):
            raise BadInput(
                "during",
                self.during,
                "use at_step, after_s or 'recommit': nothing is committed there",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("poison_snapshot", where=self.where, parameter=self.parameter, key=self.key)
        yield await target.read_back()
