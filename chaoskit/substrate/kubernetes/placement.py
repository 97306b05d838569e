"""On which machines a pod is made, and on which not: those that are lost, as long as the scheduler may not know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Longer than a cluster takes to notice that a machine is silent (40 to 50 s) and to keep pods off it by itself.
AVOID_S = 90.0
_WEIGHT = 100  # the most


class LostMachines:
    """Machines whose pods have fallen silent. Pure: it is told the time."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def note_lost(self, machine: str, now_s: float) -> None:
        """A pod there does not answer any more. "" for a machine that is not known."""
        if machine:
            self._lost_s[machine] = now_s

    def note_back(self, machine: str) -> None:
        """A pod that was made later has come from there."""
        self._lost_s.pop(machine, None)

    def avoided(self, now_s: float) -> tuple[str, ...]:
        """Those that are to be avoided now."""
        return tuple(sorted(one for one, lost_s in list(self._lost_s.items()) if now_s < lost_s + AVOID_S))


def only_on(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to one of these machines, beside what its own affinity asks for. None: to any."""
    if machines:
        terms = _required_terms(pod)
        terms[:] = [_with_field(term, _named("In", machine)) for term in terms for machine in machines]


def keep_off(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to other machines than these, beside what its own affinity asks for."""
    if machines:
        terms = _required_terms(pod)
        terms[:] = [_with_field(term, *(_named("NotIn", machine) for machine in machines)) for term in terms]


def rather_not_on(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to other machines than these, if it can."""
    if machines:
        affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
        wishes = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
        off = _with_field({}, *(_named("NotIn", machine) for machine in machines))
        wishes.append({"weight": _WEIGHT, "preference": off})


def _required_terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """What its affinity requires, to be changed in place: of several terms any is enough."""
    affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms: list[dict[str, Any]] = required.setdefault("nodeSelectorTerms", [{}])
    return terms


def _named(operator: str, machine: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": operator, "values": [machine]}


def _with_field(term: dict[str, Any], *fields: dict[str, Any]) -> dict[str, Any]:
    return term | {"matchFields": [*term.get("matchFields", ()), *fields]}
