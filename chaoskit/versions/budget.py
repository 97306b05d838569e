"""Parsing of durations such as ``10m``.

-> versions/schedule.py: what ends when the budget is spent.
"""

from __future__ import annotations

import re

from chaoskit.errors import BadInput

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds_of(text: str, field: str) -> float:
    """Return a duration such as ``90s``, ``10m`` or ``2h`` in seconds.

    Raise BadInput if it is no such duration, or 0.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise BadInput(field, text, "give a time above 0, such as 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]
