"""Fields of requests: their types, their bounds, and their defaults.

-> ``hand/processes/operations.py`` and ``hand/network/operations.py`` list the fields of each operation.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union

from .lines import NUMBER_MAX, shown
from .refusals import RefusedRequest

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]
DIRECTIONS = ("in", "out")
#: The longest time to live. A client that needs more extends it.
LASTS_MAX_S = 86400.0
_REQUIRED = object()


class RequestField(NamedTuple):
    """A field of an operation.

    Attributes:
        read: returns the value, or raises ValueError with the remedy.
        default: the value of a field that is missing, unless the field is required.
    """

    read: Callable[[Any], Any]
    default: Any = _REQUIRED


class HandOperation(NamedTuple):
    """An operation: its fields, and the function that carries it out.

    The function gets the number of the request and the values of the fields. It returns the answer.
    """

    fields: Mapping[str, RequestField]
    act: Callable[[int, Mapping[str, Any]], dict[str, Any]]


def check_fields(
    fields: Mapping[str, RequestField], values: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the values of all fields of an operation, defaults included.

    Raises:
        RefusedRequest: for a value that is wrong, a field that is missing, or an unknown field.
    """
    for name, value in values.items():
        if name not in fields:
            listed = ", ".join(fields) or "no fields"
            raise RefusedRequest(str(shown(name)), shown(value), f"leave it out: it takes {listed}")
    checked = {}
    for name, field in fields.items():
        if name not in values and field.default is not _REQUIRED:
            checked[name] = field.default
            continue
        try:
            checked[name] = field.read(values.get(name))
        except ValueError as error:
            raise RefusedRequest(name, shown(values.get(name)), str(error)) from None
    return checked


def whole(low: int, high: int) -> Callable[[Any], int]:
    """Return a reader of whole numbers from ``low`` to ``high``."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"give a whole number from {low} to {high}")
        return value

    return read


def decimal(above: float, up_to: float) -> Callable[[Any], float]:
    """Return a reader of numbers above ``above`` and up to ``up_to``."""

    def read(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not above < value <= up_to or not math.isfinite(value):
            raise ValueError(f"give a number above {above:g} and up to {up_to:g}")
        return float(value)

    return read


def word(*words: str) -> Callable[[Any], str]:
    """Return a reader of one of some words."""

    def read(value: Any) -> str:
        if value not in words or not isinstance(value, str):
            raise ValueError(f"use one of {', '.join(words)}")
        return value

    return read


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


def interface(value: Any) -> str:
    """Return the name of a network interface; "" stands for the one of the default route."""
    if not isinstance(value, str) or len(value) > 15 or not value.isprintable() or "/" in value:
        raise ValueError("give the name of a network interface")
    if value.startswith("-") or any(character.isspace() for character in value):
        raise ValueError("give the name of a network interface")
    return value


def address(value: Any) -> str:
    """Return an IP address."""
    remedy = "give an IP address, such as 10.0.0.7"
    if not isinstance(value, str):
        raise ValueError(remedy)
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError(remedy) from None


def addresses(value: Any) -> list[Network]:
    """Return IP addresses and networks, in order and without overlaps."""
    remedy = "give a list of IP addresses or networks, such as 10.0.0.7 or 10.0.0.0/24"
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(remedy)
    try:
        networks = [ipaddress.ip_network(text) for text in value]
    except ValueError:
        raise ValueError(remedy) from None
    return [
        *ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv4Network)),
        *ipaddress.collapse_addresses(n for n in networks if isinstance(n, ipaddress.IPv6Network)),
    ]


def directions(value: Any) -> tuple[str, ...]:
    """Return directions of packets, as the pod sees them: ``in``, ``out``, or both."""
    if not isinstance(value, list) or not value or not all(d in DIRECTIONS for d in value):
        raise ValueError('give a list with "in", "out", or both')
    return tuple(direction for direction in DIRECTIONS if direction in value)


PID = RequestField(whole(1, 2**22))  # PID_MAX_LIMIT of the kernel
TICKS = RequestField(whole(0, 2**63))
LASTS_S = RequestField(decimal(0.0, LASTS_MAX_S))
SHARE = RequestField(decimal(0.0, 1.0))
EFFECT = RequestField(whole(0, NUMBER_MAX))
ADDRESSES = RequestField(addresses)
DIRECTION_LIST = RequestField(directions, DIRECTIONS)
