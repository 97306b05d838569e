"""Room that the quotas of a namespace leave for pods. Pure: it reads objects, and asks nothing."""

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
#: Keys of a quota that count pods themselves.
_PODS = ("pods", "count/pods")
#: Resources that a quota may name without ``requests.`` before them.
_SHORT = ("cpu", "memory", "ephemeral-storage")


def amount(quantity: object) -> Decimal:
    """Return a Kubernetes quantity, such as ``500m`` or ``1Gi``, as a number. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or (found[3] or "") not in _SUFFIXES:
        raise ValueError(f"{quantity!r} is no quantity")
    number, exponent, suffix = found.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _SUFFIXES[suffix or ""])


def usage(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the share of a pod in each key of a quota. ``pod``: with the defaults that the server adds."""
    used = dict.fromkeys(_PODS, Decimal(1))
    for kind in ("requests", "limits"):
        for name, needed in _effective(pod.get("spec", {}), kind).items():
            used[f"{kind}.{name}"] = needed
            if kind == "requests" and name in _SHORT:
                used[name] = needed
    return used


def _effective(spec: Mapping[str, Any], kind: str) -> dict[str, Decimal]:
    """Return the sum of what runs at once: containers and sidecars, or one init container beside earlier sidecars."""
    running: dict[str, Decimal] = {}
    starting: dict[str, Decimal] = {}
    for container in spec.get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            running = _joined(running, _asked(container, kind), operator.add)
        else:
            starting = _joined(
                starting, _joined(running, _asked(container, kind), operator.add), max
            )
    for container in spec.get("containers", ()):
        running = _joined(running, _asked(container, kind), operator.add)
    overhead = {name: amount(quantity) for name, quantity in (spec.get("overhead") or {}).items()}
    total = _joined(_joined(running, starting, max), overhead, operator.add)
    return total | _asked(spec, kind)  # what a pod asks for as a whole counts instead


def _asked(container: Mapping[str, Any], kind: str) -> dict[str, Decimal]:
    quantities = (container.get("resources") or {}).get(kind) or {}
    return {name: amount(quantity) for name, quantity in quantities.items()}


def _joined(
    first: Mapping[str, Decimal],
    second: Mapping[str, Decimal],
    join: Callable[[Decimal, Decimal], Decimal],
) -> dict[str, Decimal]:
    nothing = Decimal(0)
    return {
        name: join(first.get(name, nothing), second.get(name, nothing))
        for name in (*first, *second)
    }


def lacking(
    quotas: Iterable[Mapping[str, Any]], pods: Iterable[tuple[Mapping[str, Any], int]]
) -> str:
    """Return why so many pods do not fit into the quotas of their namespace; "" if they fit.

    A quota with scopes counts some pods only: it is left to the server, which knows which.
    """
    needed: dict[str, Decimal] = {}
    number = 0
    for pod, count in pods:
        number += count
        needed = _joined(
            needed, {name: share * count for name, share in usage(pod).items()}, operator.add
        )
    return next((reason for quota in quotas for reason in _lacking(quota, needed, number)), "")


def _lacking(quota: Mapping[str, Any], needed: Mapping[str, Decimal], number: int) -> Iterator[str]:
    spec, status = quota.get("spec", {}), quota.get("status", {})
    if spec.get("scopes") or spec.get("scopeSelector"):
        return
    for name, hard in (status.get("hard") or spec.get("hard") or {}).items():
        used = status.get("used", {}).get(name, "0")
        if needed.get(name) and needed[name] > amount(hard) - amount(used):
            pods = "1 pod" if number == 1 else f"{number} pods"
            more = f"{needed[name].normalize():f}"
            yield f"{quota['metadata']['name']} allows {name}={hard} and {used} are used, but {pods} need {more}"
