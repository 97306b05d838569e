"""On which machines no pod is to be made: those that are lost, as long as the scheduler may not know that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Longer than a cluster takes to notice that a machine is silent (40 to 50 s) and to keep pods off it by itself.
AVOID_S = 90.0


class LostMachines:
    """Machines whose pods have fallen silent. Pure: it is told the time."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def lose(self, machine: str, now_s: float) -> None:
        """A pod there does not answer any more. "" for a machine that is not known."""
        if machine:
            self._lost_s[machine] = now_s

    def is_back(self, machine: str) -> None:
        """A pod that was made later has come from there."""
        self._lost_s.pop(machine, None)

    def avoided(self, now_s: float) -> tuple[str, ...]:
        """Those that are to be avoided now."""
        return tuple(sorted(one for one, lost_s in self._lost_s.items() if now_s < lost_s + AVOID_S))


def keep_off(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to other machines than these, beside what its own affinity asks for."""
    if not machines:
        return
    affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.setdefault("nodeSelectorTerms", [{}]):  # any of them is enough
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [machine]} for machine in machines]
        term.setdefault("matchFields", []).extend(fields)
