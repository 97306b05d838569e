"""The reduction of a step's gradients over the ranks, out of place, with everybody's news aboard.

:class:`ExactReducer` gives the same bits at every world size and for every ownership of the shards;
:class:`FastReducer` is the backend's all-reduce. Both tell every rank, without a further collective, the *sidecar* of
each rank (losses, votes: a few float64, bit for bit) and whose contribution is not finite.
"""

from __future__ import annotations

from chaoskit.config import Reduction
from chaoskit.runtime.reduction.exact import ExactReducer
from chaoskit.runtime.reduction.fast import FastReducer
from chaoskit.runtime.reduction.gradients import FlatLayout, LocalGradients
from chaoskit.runtime.reduction.reducer import (
    Contribution,
    CorruptSegment,
    DoubtfulSum,
    Reduced,
    Reducer,
)

__all__ = [
    "Contribution",
    "CorruptSegment",
    "DoubtfulSum",
    "ExactReducer",
    "FastReducer",
    "FlatLayout",
    "LocalGradients",
    "Reduced",
    "Reducer",
    "make_reducer",
]


def make_reducer(kind: Reduction, local: LocalGradients, sidecar_size: int) -> Reducer:
    """The reducer that the configuration names."""
    return (
        ExactReducer(local, sidecar_size) if kind == "exact" else FastReducer(local, sidecar_size)
    )
