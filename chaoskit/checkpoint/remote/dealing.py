"""Which rank reads what from a store, and when, if several ranks read together. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Dealt(NamedTuple):
    """A chunk, by its number in the snapshot: the rank that reads it, and the others that need it."""

    chunk: int
    reader: int
    others: tuple[int, ...]


def deal(needs: NDArray[np.bool_], sizes: Sequence[int]) -> list[Dealt]:
    """Each chunk that is needed to one of the ranks that need it: the one that has been dealt the least bytes.

    Args:
        needs: ranks × chunks: whether the rank needs the chunk.
        sizes: of the chunks in bytes.
    """
    dealt, load_bytes = [], [0] * len(needs)
    for chunk in np.flatnonzero(needs.any(axis=0)).tolist():
        ranks = np.flatnonzero(needs[:, chunk]).tolist()
        reader = min(ranks, key=lambda rank: (load_bytes[rank], rank))
        load_bytes[reader] += sizes[chunk]
        dealt.append(Dealt(chunk, reader, tuple(rank for rank in ranks if rank != reader)))
    return dealt


def rounds(dealt: Sequence[Dealt], at_a_time: int) -> list[list[Dealt]]:
    """What is read at the same time: of every rank the next ``at_a_time`` chunks. All ranks find the same rounds."""
    count: defaultdict[int, int] = defaultdict(int)
    found: list[list[Dealt]] = []
    for one in dealt:
        number = count[one.reader] // at_a_time
        count[one.reader] += 1
        if number == len(found):
            found.append([])
        found[number].append(one)
    return found
