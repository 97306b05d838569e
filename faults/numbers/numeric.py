"""Fault ``NaN``: a value on one rank is not a number.

-> runtime/injection/numbers.py writes the NaN in the worker and counts it.
-> runtime/integrity/nonfinite_guard.py and runtime/step/inquiry.py: how the rank is found.
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

WHERES = ("weight", "gradient", "activation")


@dataclass(frozen=True, kw_only=True)
class NaN(Fault):
    """Write a NaN into one value on one rank.

    Args:
        parameter: name of a model parameter, as in ``model.named_parameters()``; for
            ``activation``, the output of the module that owns it. Empty for the first one that is
            trained; the evidence names it.
        where: ``weight``, ``gradient`` or ``activation``.
        sticky: poison the gradient or activation again every time it is computed, as broken
            hardware would.
    """

    parameter: str = ""
    where: str = "gradient"
    sticky: bool = False

    family: ClassVar[str] = "numbers"
    is_felt: ClassVar[bool] = True
    # the job's own code may fail on it
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES | {"nonfinite", "corrupt"}
    effect: ClassVar[str] = (
        "one value on one rank is not a number; a plain all-reduce would spread it in one step"
    )
    evidence: ClassVar[str] = "non-finite values counted in the same tensor before and after"
    stands_for: ClassVar[str] = "non-finite losses, of which most came from bad machines"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.NAN,)
    impact: ClassVar[str] = (
        "the owner of the segment finds the contribution not finite before the step commits; its rank is named and "
        "replaced"
    )
    sample: ClassVar[Mapping[str, Any]] = {"rank": 2, "at_step": 20, "parameter": "head.weight"}
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"where": where} for where in WHERES)

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.where not in WHERES:
            raise BadInput("where", self.where, f"use one of {', '.join(WHERES)}")
        if self.during is not None:
            raise BadInput(
                "during",
                self.during,
                "use at_step or after_s: in a recovery no gradient is computed",
            )
        if self.phase not in ("forward", "backward") or (
            self.where == "activation" and self.phase != "forward"
        ):
            raise BadInput(
                "phase",
                self.phase,
                f"use 'forward': in {self.phase} the {self.where} exists already",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act("nan", parameter=self.parameter, where=self.where, sticky=self.sticky)
        yield await target.read_back()
