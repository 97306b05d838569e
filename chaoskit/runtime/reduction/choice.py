"""The choice of the reduction of a step's gradients over the ranks, out of place, with a sidecar.

:class:`ExactReducer` gives the same bits at every world size and for every ownership of the shards.
:class:`FastReducer` is the backend's all-reduce. Both give every rank, without a further
collective, the *sidecar* of each rank (losses, votes: a few float64, bit for bit). They also name
the ranks that contributed non-finite numbers.

-> reduction/reducer.py: the interface, and what happens to a reduction that fails.
reduction/sidecar.py: what is in a sidecar. reduction/tree.py: the order of the additions.
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


def make_reducer(reduction: Reduction, local: LocalGradients, sidecar_size: int) -> Reducer:
    """Return a new reducer of ``local``, of the kind that the configuration names."""
    return (
        ExactReducer(local, sidecar_size)
        if reduction == "exact"
        else FastReducer(local, sidecar_size)
    )
