"""Which moments and targets each kind of fault can take, found by asking its own checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.faults.base import DRAWN_ROLES, LIVE_ROLES, Fault
from chaoskit.vocabulary import STRIKE_PHASES, TRIGGER_PHASES

#: A run in which every role stands for at least one rank.
_NODES, _STEPS = 4, 60
#: A refusal that names one of these is about the moment or the target; any other is about the machine.
_PLACES = ("rank", "at_step", "phase", "after_s", "during", "recovery")


@dataclass(frozen=True, slots=True)
class Moments:
    """What one form of a fault can take.

    Attributes:
        form: the arguments that make this form, such as ``{"how": "gil"}``; empty for the only one.
        phases: of a step. times: whether it can be given a time. recoveries: phases of a recovery. roles: of ranks.
    """

    form: Mapping[str, Any]
    phases: tuple[str, ...]
    times: bool
    recoveries: tuple[str, ...]
    roles: tuple[str, ...]


def moments(kind: type[Fault]) -> list[Moments]:
    """The moments and roles of each form of a fault."""
    return [_moments(kind, form) for form in kind.forms]


def _moments(kind: type[Fault], form: Mapping[str, Any]) -> Moments:
    fixed = {**kind.sample, **form}
    fixed.pop("at_step")

    def takes(**place: Any) -> bool:
        return _is_accepted(kind(**fixed | place))

    places: list[dict[str, Any]] = [
        {"at_step": 20},
        *({"during": phase} for phase in STRIKE_PHASES),
    ]
    of_type = {item.name: item.type for item in fields(kind)}["rank"]
    roles = (
        () if of_type == "int" else (*DRAWN_ROLES, *LIVE_ROLES)
    )  # of a number: the rank means nothing to it
    return Moments(
        form,
        phases=tuple(phase for phase in TRIGGER_PHASES if takes(at_step=20, phase=phase)),
        times=takes(after_s=1.0),
        recoveries=tuple(phase for phase in STRIKE_PHASES if takes(during=phase)),
        roles=tuple(role for role in roles if any(takes(rank=role, **at) for at in places)),
    )


def _is_accepted(fault: Fault) -> bool:
    try:
        fault.validate(nodes=_NODES, steps=_STEPS)
    except BadInput as refused:
        return refused.field not in _PLACES
    return True
