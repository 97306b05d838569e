"""Language of SLA lines: ``lost_steps == 0``, ``recovery.p95 <= 2 s``, ``recovery.p50 / step <=
2.5``.

    line   ::= number [ "." statistic ] [ "/" number ] relation value [ unit ]
             | "recovered" | "passed" | "losses == twin"
    number ::= a number of a run, such as recovery, recovery.restored, step, goodput

A line with a statistic is an *objective*: ``p95`` means that 95 % of the runs are within the limit.
A line without a statistic, or with ``max``, holds *always*: each run must be within the limit.

-> history/record.py: the numbers of a run, ``KNOWN``. sla/judge.py: when the runs prove a line.
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
    rf"(?P<number>{_NAME}?)(?:\.(?P<statistic>p\d+(?:\.\d+)?|max|min|mean|avg|median))?(?:\s*/\s*(?P<divisor>{_NAME}))?"
    r"\s*(?P<relation><=|>=|==|<|>|=)\s*(?P<value>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[a-z%]*)",
    re.ASCII,
)
_ABBREVIATIONS = {
    "recovered": "recovered == 1",
    "passed": "passed == 1",
    "losses==twin": "losses_equal == 1",
}
#: Units of counted numbers. They can be compared for equality; measured numbers cannot.
_COUNTED = ("count", "steps")
_BOOLEAN_NUMBERS = (record.RECOVERED, record.PASSED, record.LOSSES_EQUAL)
#: Numbers that others may be divided by.
DIVISORS = (record.STEP, record.BOUND)
#: Units that may be written for each kind of number, each with the factor that converts a value.
_UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "ms": 1e-3, "min": 60.0},
    "ratio": {"%": 0.01},
    "count": {"": 1.0},
    "steps": {"": 1.0, "steps": 1.0},
    "quotient": {"": 1.0, "x": 1.0},
}
#: Statistics: the share of runs that must be within the limit.
_SHARES = {"max": 1.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
#: Numbers of a recovery. A run that did not recover misses any limit of them.
_RECOVERY_NUMBERS = (record.RECOVERY, "full_strength")


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on a number of a run, or on a ratio of two.

    Attributes:
        text: the line as it was written, with single spaces.
        number: the name of the number.
        divisor: the name of the number that it is divided by; "" for no ratio.
        limit: the limit in the unit of the number: seconds, steps or a count; a percentage as a
            fraction.
        share: the share of all runs that must be within the limit; 1 for a line that holds always.
    """

    text: str
    number: str
    divisor: str = ""
    relation: Relation
    limit: float
    share: float = 1.0

    @property
    def is_objective(self) -> bool:
        """True if the limit applies to a share of the runs and not to each run."""
        return self.share < 1.0

    def holds(self, run: RunRecord) -> bool | None:
        """Return True if a run is within the limit; None if it does not have the number.

        The result is also None if it lacks the divisor, or the divisor is 0. A run that did not
        come back misses each limit of ``recovery``, of its phases and of ``full_strength``.
        """
        if not record.came_back(run) and self.number.partition(".")[0] in _RECOVERY_NUMBERS:
            return False  # this includes a run that came back from one fault, but not from the next
        measured = self._measured_value(run)
        return None if measured is None else _RELATIONS[self.relation](measured, self.limit)

    def _measured_value(self, run: RunRecord) -> float | None:
        """Return the number or ratio of a run; None if it has none."""
        metric = run.metrics.get(self.number)
        if metric is None or not self.divisor:
            return None if metric is None else metric.value
        divisor = run.metrics.get(self.divisor)
        return metric.value / divisor.value if divisor is not None and divisor.value else None


_RELATIONS: dict[Relation, Callable[[float, float], bool]] = {
    "<=": lambda number, limit: number <= limit,
    ">=": lambda number, limit: number >= limit,
    "==": lambda number, limit: number == limit,
}


def parse(text: str, field: str) -> Condition:
    """Return the condition that a line states.

    Args:
        field: the name of the line in errors.

    Raises:
        BadInput: if the line cannot be parsed, or if its number, statistic, ratio, relation, limit
            or unit is not allowed. It has a remedy.
    """
    match = _LINE.fullmatch(_ABBREVIATIONS.get("".join(text.split()), text).strip())
    if match is None:
        raise BadInput(
            field,
            text,
            "write it as lost_steps == 0, recovery.p95 <= 2 s or recovery.p50 / step <= 2.5",
        )
    number, divisor, relation = match["number"], match["divisor"] or "", match["relation"]
    numbers = record.KNOWN
    for name in (number, *([divisor] if divisor else [])):
        if name not in numbers:
            raise BadInput(field, text, f"there is no number {name}: {name_remedy(name, numbers)}")
    unit, better = numbers[number]
    if divisor and (divisor not in DIVISORS or unit != "s" or number in DIVISORS):
        raise BadInput(
            field,
            text,
            f"divide a duration by one of {', '.join(DIVISORS)} of the same run",
        )
    limit = float(match["value"]) * _unit_factor(
        "quotient" if divisor else unit, match["unit"], field, text
    )
    if (number in _BOOLEAN_NUMBERS and limit != 1) or (
        unit == "ratio" and not divisor and limit > 1
    ):
        raise BadInput(
            field,
            text,
            "use 1, or leave it out" if number in _BOOLEAN_NUMBERS else "use 100 % or less",
        )
    return Condition(
        text=" ".join(text.split()),
        number=number,
        divisor=divisor,
        relation=_parse_relation(relation, better, unit in _COUNTED, field, text),
        limit=limit,
        share=_statistic_share(match["statistic"] or "", field, text),
    )


def _parse_relation(
    relation: str, better: record.Better, is_counted: bool, field: str, text: str
) -> Relation:
    """Return the relation of a line.

    Raise BadInput if it contradicts the better direction of the number, or is none of ``<=``,
    ``>=`` and, for a counted number, ``==``.
    """
    by_direction: dict[str, tuple[Relation, ...]] = {
        "lower": ("<=",),
        "higher": (">=",),
        "": ("<=", ">="),
    }
    equal: tuple[Relation, ...] = ("==",) if is_counted else ()
    allowed = (*by_direction[better], *equal)
    for candidate in allowed:
        if relation == candidate:
            return candidate
    raise BadInput(field, text, f"use {' or '.join(allowed)}: {better or 'either'} is better")


def _unit_factor(kind: str, written_unit: str, field: str, text: str) -> float:
    """Return the factor that converts a written unit. Raise BadInput if it does not fit the number.

    Args:
        kind: the kind of number, a key of :data:`_UNITS`.
        written_unit: the unit in the line; "" for none.
    """
    units = _UNITS[kind]
    if written_unit not in units:
        choices = " or ".join(name or "no unit" for name in units)
        raise BadInput(field, text, f"give the value {'in ' if '' not in units else ''}{choices}")
    return units[written_unit]


def _statistic_share(statistic: str, field: str, text: str) -> float:
    """Return the share of runs that a statistic stands for; 1 for no statistic.

    Raise BadInput if it is unknown, a mean or a median.
    """
    if (share := _SHARES.get(statistic or "max")) is not None:
        return share
    if statistic in ("mean", "avg"):
        raise BadInput(
            field,
            text,
            f"use p50: one slow run moves a {statistic}, which then does not describe the others",
        )
    statistics = ", ".join(_SHARES)
    raise BadInput(
        field,
        text,
        "use p50" if statistic == "median" else f"use one of {statistics}; max holds always",
    )
