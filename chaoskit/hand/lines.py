"""Lines of the protocol: requests, answers and events, each a JSON object on one line.

A request has a ``number`` and the operation ``do``. Each request gets one line with its number, and
with ``answer``, ``error`` (bad input) or ``unable`` (a refusal of the kernel). A line with ``event``
tells of an effect by the number of the request that began it.

-> ``hand/server.py`` reads and writes them; ``hand/fields.py`` checks the fields of a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from .refusals import RefusedRequest

#: Longest request, without its end of line. Addresses of 2,000 pods have about 32 KiB.
LINE_SIZE_MAX_BYTES = 65536
NUMBER_MAX = 2**53  # the largest whole number that every JSON reader keeps
_SHOWN_SIZE_MAX = 200


class HandRequest(NamedTuple):
    """A request, whose fields are not checked yet."""

    number: int
    operation: str
    fields: Mapping[str, Any]


class RequestSplitter:
    """Splits the bytes of a stream into lines, and drops lines that are too long."""

    def __init__(self) -> None:
        self._begun = b""
        self._is_too_long = False

    def split(self, data: bytes) -> list[bytes | None]:
        """Return the lines that ``data`` completes; None stands for a line that is too long.

        A long line is reported at once, not at its end. Empty lines are left out.
        """
        lines: list[bytes | None] = []
        *complete, self._begun = (self._begun + data).split(b"\n")
        for line in complete:
            if self._is_too_long:  # the end of a line that was reported
                self._is_too_long = False
            elif len(line) > LINE_SIZE_MAX_BYTES:
                lines.append(None)
            elif line.strip():
                lines.append(line)
        if self._is_too_long:
            self._begun = b""
        elif len(self._begun) > LINE_SIZE_MAX_BYTES:
            lines.append(None)
            self._begun, self._is_too_long = b"", True
        return lines


def read_request(line: bytes) -> HandRequest:
    """Return the request that a line holds.

    Raises:
        RefusedRequest: if the line is not a JSON object, or lacks a number or an operation.
    """
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RefusedRequest("line", shown(line), "send one JSON object a line") from None
    if not isinstance(record, dict):
        raise RefusedRequest("line", shown(line), "send one JSON object a line")
    number = number_of(record)
    if number is None:
        raise RefusedRequest(
            "number", shown(record.get("number")), f"give a whole number from 0 to {NUMBER_MAX}"
        )
    operation = record.pop("do", None)
    if not isinstance(operation, str):
        raise RefusedRequest("do", shown(operation), "give the name of an operation")
    del record["number"]
    return HandRequest(number, operation, record)


def number_in(line: bytes) -> int | None:
    """Return the number of the request in a line, even a bad one; None if it has no number."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return number_of(record) if isinstance(record, dict) else None


def number_of(record: Mapping[str, Any]) -> int | None:
    """Return the number of a request; None if it is missing or is not a whole number."""
    number = record.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        return None
    return number if 0 <= number <= NUMBER_MAX else None


def write_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line."""
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def shown(value: object) -> object:
    """Return a value of a request as an answer may repeat it: short, and nothing but text."""
    if value is None or isinstance(value, (bool, int, float)):
        return value if len(str(value)) <= _SHOWN_SIZE_MAX else "a very large number"
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= _SHOWN_SIZE_MAX else f"{text[:_SHOWN_SIZE_MAX]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
