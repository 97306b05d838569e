"""The number of examples that Hypothesis draws: the night takes all that a test asks for, the gate
a quarter.
"""

from __future__ import annotations

import os

_SHARE = 4
_LEAST = 10


def examples(night: int) -> int:
    """Return ``max_examples`` for a property that is worth ``night`` examples
    (``CHAOSKIT_NIGHT=1``).
    """
    return night if os.environ.get("CHAOSKIT_NIGHT") else max(min(night, _LEAST), night // _SHARE)
