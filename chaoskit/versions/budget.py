"""Durations as people write them."""

from __future__ import annotations

import re

from chaoskit.errors import BadInput

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds_of(text: str, field: str) -> float:
    """A duration such as ``90s``, ``10m`` or ``2h``, in seconds. Raises BadInput if it is none above 0."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise BadInput(field, text, "give a time above 0, such as 90s, 10m or 2h")
    return float(found[1]) * _SECONDS[found[2]]
