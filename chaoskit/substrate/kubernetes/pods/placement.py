"""On which machines a pod is made, and on which not: those that are lost, as long as the scheduler may not know it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from chaoskit.substrate.kubernetes.pods.quotas import amount, usage

#: Longer than a cluster takes to notice that a machine is silent (40 to 50 s) and to keep pods off it by itself.
AVOID_S = 90.0
_WEIGHT = 100  # the most
_KEEP_OFF = ("NoSchedule", "NoExecute")
#: Taints by which a cluster says that a machine takes no pods for now.
_CORDONED = "node.kubernetes.io/unschedulable"
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NAME = "metadata.name"
#: Resources whose amounts are bytes.
_BYTES = ("memory", "ephemeral-storage")


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
        return tuple(
            sorted(one for one, lost_s in list(self._lost_s.items()) if now_s < lost_s + AVOID_S)
        )


def only_on(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to one of these machines, beside what its own affinity asks for. None: to any."""
    if machines:
        terms = _required_terms(pod)
        terms[:] = [
            _with_field(term, _named("In", machine)) for term in terms for machine in machines
        ]


def keep_off(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Have a pod go to other machines than these, beside what its own affinity asks for."""
    if machines:
        terms = _required_terms(pod)
        terms[:] = [
            _with_field(term, *(_named("NotIn", machine) for machine in machines)) for term in terms
        ]


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
    return {"key": _NAME, "operator": operator, "values": [machine]}


def _with_field(term: dict[str, Any], *fields: dict[str, Any]) -> dict[str, Any]:
    return term | {"matchFields": [*term.get("matchFields", ()), *fields]}


# -- machines that take no pods -----------------------------------------------------------------------------------


def why_nowhere(pod: Mapping[str, Any], machines: Iterable[Mapping[str, Any]]) -> str:
    """Return why each machine on which a pod may be takes none now; "" if one does.

    Also "" if the pod may be on none of them: a cluster may make such a machine when it sees the pod.
    """
    suitable = [machine for machine in machines if suits(pod, machine)]
    reasons = [(machine["metadata"]["name"], _barred(pod, machine)) for machine in suitable]
    return (
        ", ".join(f"{name} {reason}" for name, reason in reasons)
        if all(reason for _, reason in reasons)
        else ""
    )


def why_too_small(pod: Mapping[str, Any], machines: Iterable[Mapping[str, Any]]) -> str:
    """Return which request of a pod exceeds each machine on which the pod may be; "" if one is large enough.

    Pods that are there already are not counted: they may go.

    Raises:
        ValueError: if an amount is no quantity of Kubernetes.
    """
    suitable = [machine for machine in machines if suits(pod, machine)]
    asked = {
        name.removeprefix("requests."): need
        for name, need in usage(pod).items()
        if name.startswith("requests.")
    }
    room = [(machine.get("status", {}).get("allocatable") or {}) for machine in suitable]
    excess = [
        [name for name, need in asked.items() if need > amount(each.get(name, "0"))]
        for each in room
    ]
    if not suitable or not all(excess):
        return ""
    lacking = [name for name in asked if all(name in names for names in excess)]
    if not lacking:
        return (
            f"no machine has all of {', '.join(_shown(name, need) for name, need in asked.items())}"
        )
    name = lacking[0]
    most = max(amount(each.get(name, "0")) for each in room)
    return f"no machine has {_shown(name, asked[name])}; the largest has {_shown(name, most)}"


def _shown(name: str, number: Decimal) -> str:
    return f"{name}={number / 2**30:.3g}Gi" if name in _BYTES else f"{name}={number.normalize():f}"


def _barred(pod: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    spec = machine.get("spec", {})
    cordon = {"key": _CORDONED, "effect": "NoSchedule"}
    if spec.get("unschedulable") and not _is_tolerated(pod, cordon):
        return "is cordoned"
    return "" if is_ready(machine) else "is not ready"


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return whether a node of the cluster is ready, and has no taint by which the cluster keeps pods off it."""
    conditions = node.get("status", {}).get("conditions", ())
    taints = node.get("spec", {}).get("taints", ())
    says_ready = any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)
    return says_ready and not any(one["key"] in _NOT_READY for one in taints)


def suits(pod: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Return whether a pod may be on a machine by its node selector, its affinity and its tolerations."""
    spec, labels = pod["spec"], machine["metadata"].get("labels", {})
    fields = {_NAME: machine["metadata"]["name"]}
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms")
    if terms and not any(_matches(term, labels, fields) for term in terms):
        return False
    taints = machine.get("spec", {}).get("taints", ())
    passing = (_CORDONED, *_NOT_READY)
    lasting = [
        taint for taint in taints if taint["effect"] in _KEEP_OFF and taint["key"] not in passing
    ]
    return all(_is_tolerated(pod, taint) for taint in lasting)


def _matches(term: Mapping[str, Any], labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    expressions = [(one, labels) for one in term.get("matchExpressions", ())]
    expressions += [(one, fields) for one in term.get("matchFields", ())]
    return all(_holds(expression, found) for expression, found in expressions)


def _holds(expression: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    name, values = expression["key"], expression.get("values", ())
    match expression["operator"]:
        case "In":
            return found.get(name) in values
        case "NotIn":
            return found.get(name) not in values
        case "Exists":
            return name in found
        case "DoesNotExist":
            return name not in found
    return True  # a comparison of numbers is left to the scheduler


def _is_tolerated(pod: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in pod["spec"].get("tolerations") or ())


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") in (None, ""):
        return toleration.get("operator") == "Exists"
    has_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get(
        "value", ""
    )
    return bool(toleration["key"] == taint["key"] and has_value)
