"""Lines of an SLA: ``lost_steps == 0``, ``recovery.p95 <= 2 s``, ``recovery.p50 / step <= 2.5``.

    line   ::= number [ "." statistic ] [ "/" number ] relation value [ unit ]
             | "recovered" | "passed" | "losses == twin"
    number ::= one that runs have, such as recovery, recovery.restored, step, goodput

A line with a statistic is an *objective*: ``p95`` says that 95 % of the runs are within the limit. One without, or with
``max``, holds *always*: each run is within it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from chaoskit.errors import BadInput, name_remedy
from chaoskit.history import record
from chaoskit.history.record import RunRecord

Relation = Literal["<=", ">=", "=="]

_NAME = r"[a-z_]+(?:\.[a-z_]+)?"
_LINE = re.compile(
    rf"(?P<number>{_NAME}?)(?:\.(?P<statistic>p\d+(?:\.\d+)?|max|min|mean|avg|median))?(?:\s*/\s*(?P<below>{_NAME}))?"
    r"\s*(?P<relation><=|>=|==|<|>|=)\s*(?P<value>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[a-z%]*)",
    re.ASCII,
)
_SHORT = {
    "recovered": "recovered == 1",
    "passed": "passed == 1",
    "losses==twin": "losses_equal == 1",
}
#: What is counted can be equal to a number; what is measured cannot.
_COUNTED = ("count", "steps")
_HELD = (record.RECOVERED, record.PASSED, record.LOSSES_EQUAL)
#: By which others may be divided.
DIVISORS = (record.STEP, record.BOUND)
#: Units that may be written, by that of the number: what a value is multiplied by.
_UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "ms": 1e-3, "min": 60.0},
    "ratio": {"%": 0.01},
    "count": {"": 1.0},
    "steps": {"": 1.0, "steps": 1.0},
    "quotient": {"": 1.0, "x": 1.0},
}
#: Statistics, by the share of runs that must be within the limit.
_SHARES = {"max": 1.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
#: Numbers of a recovery: a run that did not recover missed any limit of them.
_OF_RECOVERIES = (record.RECOVERY, "full_strength")


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of one number of a run, or of a quotient of two.

    Attributes:
        text: the line as it was written. share: of all runs that must be within it; 1 for a line that holds always.
    """

    text: str
    number: str
    divisor: str = ""
    relation: Relation
    limit: float
    share: float = 1.0

    @property
    def is_objective(self) -> bool:
        """Whether it is about a share of the runs, and not about each of them."""
        return self.share < 1.0

    def holds(self, run: RunRecord) -> bool | None:
        """Whether a run is within the limit; None where it does not have the number."""
        if not record.came_back(run) and self.number.partition(".")[0] in _OF_RECOVERIES:
            return False  # also where it came back from one fault, and not from the next
        value = self._value(run)
        return None if value is None else _RELATIONS[self.relation](value, self.limit)

    def _value(self, run: RunRecord) -> float | None:
        found = run.metrics.get(self.number)
        if found is None or not self.divisor:
            return None if found is None else found.value
        divisor = run.metrics.get(self.divisor)
        return found.value / divisor.value if divisor is not None and divisor.value else None


_RELATIONS: dict[Relation, Callable[[float, float], bool]] = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "==": lambda value, limit: value == limit,
}


def parse(text: str, field: str) -> Condition:
    """The condition that a line states.

    Args:
        field: names the line in errors.

    Raises:
        BadInput: with a remedy, where it states none, or one that says the opposite of what is meant.
    """
    found = _LINE.fullmatch(_SHORT.get("".join(text.split()), text).strip())
    if found is None:
        raise BadInput(
            field,
            text,
            "write it as lost_steps == 0, recovery.p95 <= 2 s or recovery.p50 / step <= 2.5",
        )
    number, below, relation = found["number"], found["below"] or "", found["relation"]
    known = record.KNOWN
    for name in (number, *([below] if below else [])):
        if name not in known:
            raise BadInput(field, text, f"there is no number {name}: {name_remedy(name, known)}")
    unit, better = known[number]
    if below and (below not in DIVISORS or unit != "s" or number in DIVISORS):
        raise BadInput(
            field,
            text,
            f"divide a duration by one of {', '.join(DIVISORS)}, which are of the same run",
        )
    limit = float(found["value"]) * _scale(
        "quotient" if below else unit, found["unit"], field, text
    )
    if (number in _HELD and limit != 1) or (unit == "ratio" and not below and limit > 1):
        raise BadInput(
            field, text, "use 1, or leave it out" if number in _HELD else "use 100 % or less"
        )
    return Condition(
        text=" ".join(text.split()),
        number=number,
        divisor=below,
        relation=_relation(relation, better, unit in _COUNTED, field, text),
        limit=limit,
        share=_share(found["statistic"] or "", field, text),
    )


def _relation(
    relation: str, better: record.Better, is_counted: bool, field: str, text: str
) -> Relation:
    by_direction: dict[str, tuple[Relation, ...]] = {
        "lower": ("<=",),
        "higher": (">=",),
        "": ("<=", ">="),
    }
    equal: tuple[Relation, ...] = ("==",) if is_counted else ()
    allowed = (*by_direction[better], *equal)
    for one in allowed:
        if relation == one:
            return one
    raise BadInput(field, text, f"use {' or '.join(allowed)}: {better or 'either'} is better")


def _scale(unit: str, written: str, field: str, text: str) -> float:
    units = _UNITS[unit]
    if written not in units:
        told = " or ".join(name or "no unit" for name in units)
        raise BadInput(field, text, f"give its value {'in ' if '' not in units else ''}{told}")
    return units[written]


def _share(statistic: str, field: str, text: str) -> float:
    if (share := _SHARES.get(statistic or "max")) is not None:
        return share
    if statistic in ("mean", "avg"):
        raise BadInput(
            field,
            text,
            f"use p50: one slow run moves a {statistic}, and says nothing about the others",
        )
    known = ", ".join(_SHARES)
    raise BadInput(
        field, text, "use p50" if statistic == "median" else f"use one of {known}; max holds always"
    )
