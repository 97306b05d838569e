"""Fault ``BitFlip``: a bit of memory or of a result is silently wrong.

-> runtime/injection/numbers.py flips the bit in the worker and reads it back.
-> runtime/integrity/voting.py: how the ranks find the corrupt one by their seals.
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
from chaoskit.vocabulary import FAILED_CAUSES, TRIGGER_PHASES

#: Kind of value -> phases in which a flip of it takes effect: before the value is in use.
_PHASES = {
    "weight": TRIGGER_PHASES,
    "gradient": ("forward", "backward"),
    "optimizer": TRIGGER_PHASES,
    "received": ("forward", "backward", "reduce"),
}
_BITS = 64


@dataclass(frozen=True, kw_only=True)
class BitFlip(Fault):
    """Flip one bit of one number on one rank.

    Args:
        parameter: name of a model parameter, as in ``model.named_parameters()``. Empty for the
            first one that is trained; the evidence names it.
        bit: which one, from 0 (the lowest of the fraction); of a float32, 23 to 30 are the exponent
            and 31 is the sign.
        where: ``weight``; ``gradient``, of the next shard, before anything can read it;
            ``optimizer``, a tensor of the optimizer's state for this parameter; ``received``, the
            reduced gradient on this rank only, before its optimizer runs.
        element: of that tensor, counted in row-major order.
        key: for ``optimizer``, name of the state, such as Adam's ``exp_avg``.
        sticky: for ``gradient`` and ``received``, flip it again every time, as broken hardware
            would.
    """

    parameter: str = ""
    bit: int
    where: str = "weight"
    element: int = 0
    key: str = "exp_avg"
    sticky: bool = False

    family: ClassVar[str] = "numbers"
    # the job's own code may fail on it
    leads_to: ClassVar[frozenset[str]] = FAILED_CAUSES | {"nonfinite", "corrupt"}
    effect: ClassVar[str] = (
        "one bit of a weight, a gradient, the optimizer's state or a received buffer is wrong"
    )
    evidence: ClassVar[str] = (
        "the bits of this element, read back before and after, differ in this bit"
    )
    stands_for: ClassVar[str] = "silent data corruption"
    counted: ClassVar[tuple[IncidentKind, ...]] = (incidents.CORRUPTION,)
    impact: ClassVar[str] = (
        "checksums differ between ranks (an audit, for a gradient); the corrupt rank is named and replaced"
    )
    caught: ClassVar[Mapping[str, str]] = {
        "replicated, three ranks or more": "weight, optimizer and received; gradient where audits are on",
        "replicated, two ranks": (
            "the same, but neither can be outvoted: a weight or optimizer flip outside the 8 MiB, or the slice, that a "
            "rank looks at in that step ends the job, unless `state_hash_steps=1`; received with `reduction='fast'` "
            "ends it"
        ),
        "sharded within replicas (HSDP)": (
            "weight, optimizer and received; of two replicas as of two ranks above, but received has the step computed "
            "again"
        ),
        "sharded (FSDP)": "none: no other rank holds the same shard, and the job trains on",
    }
    sample: ClassVar[Mapping[str, Any]] = {
        "rank": 2,
        "at_step": 20,
        "parameter": "head.weight",
        "bit": 20,
    }
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"where": where} for where in _PHASES)
    undo: ClassVar[str] = (
        "nothing outside the process was changed; the number stays wrong until its rank is replaced"
    )

    def validate(self, *, nodes: int, steps: int | None) -> None:
        super().validate(nodes=nodes, steps=steps)
        if self.where not in _PHASES:
            raise BadInput("where", self.where, f"use one of {', '.join(_PHASES)}")
        if not 0 <= self.bit < _BITS:
            raise BadInput("bit", self.bit, f"use a bit from 0 to {_BITS - 1}; a float32 has 32")
        if self.element < 0:
            raise BadInput("element", self.element, "use 0 or more")
        if self.phase not in _PHASES[self.where]:
            allowed = " or ".join(map(repr, _PHASES[self.where]))
            raise BadInput(
                "phase",
                self.phase,
                f"use {allowed}: later the {self.where} value is in use already",
            )
        if self.where == "optimizer" and self.at_step == 0:
            raise BadInput(
                "at_step",
                self.at_step,
                "use 1 or more: before the first update the optimizer has no state",
            )
        if self.sticky and self.where in ("weight", "optimizer"):
            raise BadInput(
                "sticky",
                self.sticky,
                "use where='gradient' or 'received': these are made anew every step",
            )

    async def inject(self, target: Target) -> AsyncIterator[Evidence]:
        target.act(
            "bit_flip",
            where=self.where,
            parameter=self.parameter,
            key=self.key,
            bit=self.bit,
            element=self.element,
            sticky=self.sticky,
        )
        yield await target.read_back()
