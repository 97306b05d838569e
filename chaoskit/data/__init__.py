"""Training data in memory-mapped files, and which samples belong to which step: computed, never replayed.

    tokens = TokenFile("corpus.tokens", context=1024)
    positions = Positions(len(tokens), batch_size=512, seed=0)
    for step in range(first_step, last_step):                    # any first step costs the same: nothing
        batch = tokens.__getitems__(positions.batch(step, rank, world))

Needs nothing else of chaoskit. Names are imported when they are used: who only looks at headers needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaoskit.data.mapped import Ragged, RecordFile, TokenFile
    from chaoskit.data.pages import PageKeeper
    from chaoskit.data.permutation import Permutation
    from chaoskit.data.positions import Positions
    from chaoskit.data.writing import write_records, write_tokens

_HOMES = {
    "PageKeeper": "pages",
    "Permutation": "permutation",
    "Positions": "positions",
    "Ragged": "mapped",
    "RecordFile": "mapped",
    "TokenFile": "mapped",
    "write_records": "writing",
    "write_tokens": "writing",
}

__all__ = [
    "PageKeeper",
    "Permutation",
    "Positions",
    "Ragged",
    "RecordFile",
    "TokenFile",
    "write_records",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
