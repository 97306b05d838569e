"""Faults as text, in the form in which reports show them: ``Kill(rank=1, at_step=20)``.

-> faults/kinds.py: the names. cli/testing/attach.py reads them from the command line.
"""

from __future__ import annotations

import ast
from typing import Any

from chaoskit.errors import BadInput
from chaoskit.faults.base import Fault
from chaoskit.faults.kinds import find_kind

_EXAMPLE = "write it as in Python, such as Kill(rank=1, at_step=20)"


def parse_fault(text: str, field: str = "fault") -> Fault:
    """Return the fault that a text describes. Nothing of the text is executed.

    Args:
        text: a kind and its fields, each with a name and a plain value.
        field: name of the option or argument that has the text, for errors.

    Raises:
        BadInput: if it is no such text, or the kind or a field does not exist.
    """
    name, settings = _read_call(text, field)
    return find_kind(name, field)(**settings)


def _read_call(text: str, field: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields of a fault in a text. Raises BadInput."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadInput(field, text, _EXAMPLE) from None
    if isinstance(call, ast.Name):
        return call.id, {}
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise BadInput(field, text, _EXAMPLE)
    settings: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise BadInput(field, text, _EXAMPLE)
        try:
            settings[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            remedy = f"give {keyword.arg} a plain value: a number, a text or a tuple of them"
            raise BadInput(field, text, remedy) from None
    return call.func.id, settings
