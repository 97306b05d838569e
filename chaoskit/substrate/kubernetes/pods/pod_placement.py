"""Placement of pods on machines.

Lost machines are avoided while the scheduler may not know of the loss. Functions that restrict a
pod change its manifest in place.

-> ``pods.py`` creates pods with these restrictions, and ``kubernetes/examination.py`` reports pods
that no machine can take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from chaoskit.substrate.kubernetes.pods.quotas import amount, usage

#: Time to avoid a lost machine. A cluster takes 40 to 50 s to notice a silent machine and to
#: keep pods off it by itself.
AVOID_S = 90.0
_WEIGHT = 100  # the maximum
_KEEP_OFF = ("NoSchedule", "NoExecute")
#: Taints by which a cluster says that a machine takes no pods for now.
_CORDONED = "node.kubernetes.io/unschedulable"
_NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_NAME = "metadata.name"
#: Resources whose amounts are bytes.
_BYTES = ("memory", "ephemeral-storage")


class LostMachines:
    """The machines whose pods have fallen silent. The time is an argument."""

    def __init__(self) -> None:
        self._lost_s: dict[str, float] = {}

    def note_lost(self, machine: str, now_s: float) -> None:
        """Note that a pod on a machine does not answer any more.

        Args:
            machine: name of the machine; "" if it is unknown, which changes nothing.
            now_s: monotonic time.
        """
        if machine:
            self._lost_s[machine] = now_s

    def note_back(self, machine: str) -> None:
        """Note that a pod that was created later runs on a machine."""
        self._lost_s.pop(machine, None)

    def avoided(self, now_s: float) -> tuple[str, ...]:
        """Return the names of the machines that must be avoided now."""
        return tuple(
            sorted(
                machine
                for machine, lost_s in list(self._lost_s.items())
                if now_s < lost_s + AVOID_S
            )
        )


def only_on(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Require one of these machines, besides what the pod's own affinity requires.

    Without ``machines`` the pod is not changed.
    """
    if machines:
        terms = _required_terms(pod)
        terms[:] = [
            _with_field(term, _name_selector("In", machine))
            for term in terms
            for machine in machines
        ]


def keep_off(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Exclude these machines, besides what the pod's own affinity requires."""
    if machines:
        terms = _required_terms(pod)
        terms[:] = [
            _with_field(term, *(_name_selector("NotIn", machine) for machine in machines))
            for term in terms
        ]


def rather_not_on(pod: dict[str, Any], machines: Sequence[str]) -> None:
    """Make the scheduler prefer other machines than these."""
    if machines:
        affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
        preferences = affinity.setdefault("preferredDuringSchedulingIgnoredDuringExecution", [])
        elsewhere = _with_field({}, *(_name_selector("NotIn", machine) for machine in machines))
        preferences.append({"weight": _WEIGHT, "preference": elsewhere})


def _required_terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the node selector terms that the pod's affinity requires, to be changed in place.

    A machine needs to match only one of them.
    """
    affinity = pod["spec"].setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms: list[dict[str, Any]] = required.setdefault("nodeSelectorTerms", [{}])
    return terms


def _name_selector(operator: str, machine: str) -> dict[str, Any]:
    """Return a field selector for the name of a machine, with operator ``In`` or ``NotIn``."""
    return {"key": _NAME, "operator": operator, "values": [machine]}


def _with_field(term: dict[str, Any], *fields: dict[str, Any]) -> dict[str, Any]:
    """Return a node selector term that also requires these field selectors."""
    return term | {"matchFields": [*term.get("matchFields", ()), *fields]}


# -- machines that take no pods --------------------------------------------------------------------


def why_nowhere(pod: Mapping[str, Any], machines: Iterable[Mapping[str, Any]]) -> str:
    """Return why each machine that suits a pod takes none now, or "" if a machine takes pods.

    Return "" also if the pod suits none of them: a cluster may make such a machine when it sees the
    pod.
    """
    suitable = [machine for machine in machines if suits(pod, machine)]
    reasons = [(machine["metadata"]["name"], _why_not_now(pod, machine)) for machine in suitable]
    return (
        ", ".join(f"{name} {reason}" for name, reason in reasons)
        if all(reason for _, reason in reasons)
        else ""
    )


def why_too_small(pod: Mapping[str, Any], machines: Iterable[Mapping[str, Any]]) -> str:
    """Return the request of a pod that exceeds every suitable machine, or "" if there is none.

    Pods that are there already are not counted: they may go.

    Raises:
        ValueError: if an amount is no quantity of Kubernetes.
    """
    suitable = [machine for machine in machines if suits(pod, machine)]
    requests = {
        name.removeprefix("requests."): need
        for name, need in usage(pod).items()
        if name.startswith("requests.")
    }
    capacities = [(machine.get("status", {}).get("allocatable") or {}) for machine in suitable]
    excess = [
        [name for name, need in requests.items() if need > amount(capacity.get(name, "0"))]
        for capacity in capacities
    ]
    if not suitable or not all(excess):
        return ""
    lacking = [name for name in requests if all(name in names for names in excess)]
    if not lacking:
        return f"no machine has all of {', '.join(_amount_text(name, need) for name, need in requests.items())}"
    name = lacking[0]
    most = max(amount(capacity.get(name, "0")) for capacity in capacities)
    return f"no machine has {_amount_text(name, requests[name])}; the largest has {_amount_text(name, most)}"


def _amount_text(name: str, number: Decimal) -> str:
    """Return an amount of a resource as a user writes it; bytes in Gi."""
    return f"{name}={number / 2**30:.3g}Gi" if name in _BYTES else f"{name}={number.normalize():f}"


def _why_not_now(pod: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    """Return why a machine takes a pod not now, such as ``is cordoned``; "" if it does."""
    spec = machine.get("spec", {})
    cordon = {"key": _CORDONED, "effect": "NoSchedule"}
    if spec.get("unschedulable") and not _is_tolerated(pod, cordon):
        return "is cordoned"
    return "" if is_ready(machine) else "is not ready"


def is_ready(node: Mapping[str, Any]) -> bool:
    """Return whether a node is ready and has no taint by which the cluster keeps pods off it."""
    conditions = node.get("status", {}).get("conditions", ())
    taints = node.get("spec", {}).get("taints", ())
    says_ready = any(
        (condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions
    )
    return says_ready and not any(taint["key"] in _NOT_READY for taint in taints)


def suits(pod: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Return whether a pod may run on a machine by its node selector, affinity and tolerations.

    A cordon, and taints of a machine that is not ready, do not count: they may pass.
    """
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
    temporary = (_CORDONED, *_NOT_READY)
    lasting = [
        taint for taint in taints if taint["effect"] in _KEEP_OFF and taint["key"] not in temporary
    ]
    return all(_is_tolerated(pod, taint) for taint in lasting)


def _matches(term: Mapping[str, Any], labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Return whether a machine with these labels and fields matches a node selector term."""
    expressions = [(expression, labels) for expression in term.get("matchExpressions", ())]
    expressions += [(expression, fields) for expression in term.get("matchFields", ())]
    return all(_is_true(expression, attributes) for expression, attributes in expressions)


def _is_true(expression: Mapping[str, Any], attributes: Mapping[str, str]) -> bool:
    """Return whether an expression of a node selector is true for labels or fields."""
    name, values = expression["key"], expression.get("values", ())
    match expression["operator"]:
        case "In":
            return attributes.get(name) in values
        case "NotIn":
            return attributes.get(name) not in values
        case "Exists":
            return name in attributes
        case "DoesNotExist":
            return name not in attributes
    return True  # a comparison of numbers is left to the scheduler


def _is_tolerated(pod: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in pod["spec"].get("tolerations") or ())


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Return whether a toleration of a pod matches a taint of a machine."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") in (None, ""):
        return toleration.get("operator") == "Exists"
    has_value = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get(
        "value", ""
    )
    return bool(toleration["key"] == taint["key"] and has_value)
