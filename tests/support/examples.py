"""How many examples Hypothesis draws: at night as many as a test asks for, in the gate a quarter of them."""

from __future__ import annotations

import os

_SHARE = 4
_LEAST = 10


def examples(night: int) -> int:
    """The value of ``max_examples`` for a property that is worth ``night`` examples (``CHAOSKIT_NIGHT=1``)."""
    return night if os.environ.get("CHAOSKIT_NIGHT") else max(min(night, _LEAST), night // _SHARE)
