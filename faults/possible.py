"""Moments and targets that each kind of fault accepts, found by calling its own checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.faults.base import DRAWN_ROLES, LIVE_ROLES, Fault
from chaoskit.vocabulary import STRIKE_PHASES, TRIGGER_PHASES

#: A run in which every role stands for at least one rank.
_NODES, _STEPS = 4, 60
#: Fields of the moment and the target. A refusal that names any other field is about the machine.
_PLACES = ("rank", "at_step", "phase", "after_s", "during", "recovery")


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments and targets that one form of a fault accepts.

    Attributes:
        form: the arguments of this form, such as ``{"how": "gil"}``; empty if there is only one.
        phases: accepted phases of a step.
        times: a time is accepted.
        recoveries: accepted phases of a recovery.
        roles: accepted roles of ranks.
    """

    form: Mapping[str, Any]
    phases: tuple[str, ...]
    times: bool
    recoveries: tuple[str, ...]
    roles: tuple[str, ...]


def moments(kind: type[Fault]) -> list[Moments]:
    """Return the moments and roles of each form of a fault, in the order of ``kind.forms``."""
    return [_moments(kind, form) for form in kind.forms]


def _moments(kind: type[Fault], form: Mapping[str, Any]) -> Moments:
    """Return the moments and roles with which a fault of this form passes its own checks."""
    fixed = {**kind.sample, **form}
    fixed.pop("at_step")

    def accepts(**moment: Any) -> bool:
        return _is_accepted(kind(**fixed | moment))

    candidates: list[dict[str, Any]] = [
        {"at_step": 20},
        *({"during": phase} for phase in STRIKE_PHASES),
    ]
    rank_type = {declared.name: declared.type for declared in fields(kind)}["rank"]
    roles = (
        () if rank_type == "int" else (*DRAWN_ROLES, *LIVE_ROLES)
    )  # a rank that must be a number means nothing to the fault
    return Moments(
        form,
        phases=tuple(phase for phase in TRIGGER_PHASES if accepts(at_step=20, phase=phase)),
        times=accepts(after_s=1.0),
        recoveries=tuple(phase for phase in STRIKE_PHASES if accepts(during=phase)),
        roles=tuple(
            role for role in roles if any(accepts(rank=role, **moment) for moment in candidates)
        ),
    )


def _is_accepted(fault: Fault) -> bool:
    """Return False if the checks of a fault refuse its moment or its target.

    A refusal for another reason counts as accepted.
    """
    try:
        fault.validate(nodes=_NODES, steps=_STEPS)
    except BadInput as refused:
        return refused.field not in _PLACES
    return True
