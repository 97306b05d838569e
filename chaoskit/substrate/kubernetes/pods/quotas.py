"""Room that the quotas of a namespace leave for pods.

These functions read objects of the API server. They make no requests to it.

-> ``kubernetes/examination.py`` refuses a run that does not fit.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

_QUANTITY = re.compile(r"([+-]?[0-9.]+)(?:[eE]([+-]?[0-9]+)|([a-zA-Z]*))")
_SMALL, _LARGE = (
    {"n": -9, "u": -6, "m": -3, "": 0},
    {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18},
)
_SUFFIXES = {
    **{suffix: Decimal(10) ** power for suffix, power in (_SMALL | _LARGE).items()},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
#: Keys of a quota that count pods.
_PODS = ("pods", "count/pods")
#: Resources that a quota may name without ``requests.`` before them.
_SHORT = ("cpu", "memory", "ephemeral-storage")


def amount(quantity: object) -> Decimal:
    """Return a Kubernetes quantity, such as ``500m`` or ``1Gi``, as a number. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None or (match[3] or "") not in _SUFFIXES:
        raise ValueError(f"{quantity!r} is not a quantity of Kubernetes")
    number, exponent, suffix = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])


def usage(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the amount by which a pod uses up each key of a quota.

    Args:
        pod: the pod with the defaults that the server adds.

    Raises:
        ValueError: if an amount is no quantity of Kubernetes.
    """
    used = dict.fromkeys(_PODS, Decimal(1))
    for kind in ("requests", "limits"):
        for name, needed in _needed_at_once(pod.get("spec", {}), kind).items():
            used[f"{kind}.{name}"] = needed
            if kind == "requests" and name in _SHORT:
                used[name] = needed
    return used


def _needed_at_once(spec: Mapping[str, Any], kind: str) -> dict[str, Decimal]:
    """Return the largest sum of resources of a pod that are in use at the same time.

    Containers run beside sidecars. Each init container runs beside the sidecars that come before
    it.
    """
    running: dict[str, Decimal] = {}
    starting: dict[str, Decimal] = {}
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            running = _combined(running, _resources_of(container, kind), operator.add)
        else:
            starting = _combined(
                starting, _combined(running, _resources_of(container, kind), operator.add), max
            )
    for container in spec.get("containers", ()):
        running = _combined(running, _resources_of(container, kind), operator.add)
    overhead = {name: amount(quantity) for name, quantity in (spec.get("overhead") or {}).items()}
    total = _combined(_combined(running, starting, max), overhead, operator.add)
    return total | _resources_of(spec, kind)  # requests of the pod as a whole take precedence


def _resources_of(container: Mapping[str, Any], kind: str) -> dict[str, Decimal]:
    """Return the ``requests`` or ``limits`` of a container by resource. Raises ValueError."""
    quantities = (container.get("resources") or {}).get(kind) or {}
    return {name: amount(quantity) for name, quantity in quantities.items()}


def _combined(
    first: Mapping[str, Decimal],
    second: Mapping[str, Decimal],
    join: Callable[[Decimal, Decimal], Decimal],
) -> dict[str, Decimal]:
    """Return the amounts of both mappings, joined for each resource; a missing amount is 0."""
    nothing = Decimal(0)
    return {
        name: join(first.get(name, nothing), second.get(name, nothing))
        for name in (*first, *second)
    }


def why_not_fitting(
    quotas: Iterable[Mapping[str, Any]], pods: Iterable[tuple[Mapping[str, Any], int]]
) -> str:
    """Return the first reason for which pods do not fit into the quotas of their namespace, or "".

    A quota with scopes counts only some pods. It is left to the server, which knows these pods.

    Args:
        quotas: objects of the quotas.
        pods: pods, each with the number of its copies.

    Raises:
        ValueError: if an amount is no quantity of Kubernetes.
    """
    needed: dict[str, Decimal] = {}
    number = 0
    for pod, count in pods:
        number += count
        needed = _combined(
            needed, {name: share * count for name, share in usage(pod).items()}, operator.add
        )
    return next((reason for quota in quotas for reason in _reasons(quota, needed, number)), "")


def _reasons(quota: Mapping[str, Any], needed: Mapping[str, Decimal], number: int) -> Iterator[str]:
    """Yield a sentence for each key of a quota that has too little left for ``number`` pods."""
    spec, status = quota.get("spec", {}), quota.get("status", {})
    if spec.get("scopes") or spec.get("scopeSelector"):
        return
    for name, hard in (status.get("hard") or spec.get("hard") or {}).items():
        used = status.get("used", {}).get(name, "0")
        if needed.get(name) and needed[name] > amount(hard) - amount(used):
            pods = "1 pod" if number == 1 else f"{number} pods"
            need = f"{needed[name].normalize():f}"
            yield f"{quota['metadata']['name']} allows {name}={hard} and {used} are used, but {pods} need {need}"
