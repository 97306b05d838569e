"""Searches for a smaller input that still fails, one candidate at a time and without knowledge of
processes.

A search is a generator. It yields a candidate, receives whether the candidate fails, and returns
the smallest one that did. The best so far is the last candidate that failed, or at first the start,
so the caller can stop at any time. No candidate is yielded twice by the same search.

-> experiment/shrink/search.py runs the candidates and answers, as often as proportion.py says.
experiment/shrink/simpler.py: which candidates are simpler than another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

Search = Generator[T, bool, T]


def ddmin(items: Sequence[T]) -> Search[tuple[T, ...]]:
    """Search a 1-minimal part of a list that fails as a whole, by delta debugging; return it.

    The algorithm is that of A. Zeller and R. Hildebrandt, 2002.

    As far as the answers are right, the result does not fail without any one of its items.
    """
    best, part_count = tuple(items), 2
    refuted: set[tuple[int, ...]] = set()  # keyed by positions, because two items may be equal
    positions = tuple(range(len(best)))
    all_items = best
    while positions:
        for candidate in _cuts(positions, part_count):
            if candidate in refuted:
                continue
            if (yield tuple(all_items[position] for position in candidate)):
                part_count = max(2, part_count - 1) if len(candidate) > len(positions) // 2 else 2
                positions = candidate
                break
            refuted.add(candidate)
        else:
            if part_count >= len(positions):
                break
            part_count = min(len(positions), 2 * part_count)
    return tuple(all_items[position] for position in positions)


def _cuts(positions: tuple[int, ...], part_count: int) -> list[tuple[int, ...]]:
    """Return each of ``part_count`` pieces, then the rest without each piece.

    A single place gives the empty piece.
    """
    if len(positions) == 1:
        return [()]
    edges = [len(positions) * number // part_count for number in range(part_count + 1)]
    pieces = [positions[start:end] for start, end in pairwise(edges) if start < end]
    rests = [tuple(position for position in positions if position not in piece) for piece in pieces]
    return pieces + [remainder for remainder in rests if remainder not in pieces]


def descend(start: T, simpler: Callable[[T], Iterable[T]], key: Callable[[T], object]) -> Search[T]:
    """Go to simpler and simpler candidates that fail, and return the last one.

    The search ends when no simpler candidate fails.

    Args:
        start: the first candidate, which fails.
        simpler: returns candidates to try in place of one, the boldest first. It must not lead in
            circles.
        key: returns the identity of a candidate; a refuted one is not tried again.
    """
    best, refuted = start, {key(start)}
    has_moved = True
    while has_moved:
        has_moved = False
        for candidate in simpler(best):
            if key(candidate) in refuted:
                continue
            refuted.add(key(candidate))
            if (yield candidate):
                best, has_moved = candidate, True
                break
    return best


def minimise(
    start: T,
    items: Callable[[T], Sequence[object]],
    with_items: Callable[[T, Sequence[object]], T],
    simpler: Callable[[T], Iterable[T]],
    key: Callable[[T], object],
) -> Search[T]:
    """Run :func:`ddmin` over the items of ``start``, then :func:`descend`; return the result.

    Args:
        start: the first candidate, which fails.
        items: returns the items of a candidate.
        with_items: returns a candidate with other items.
        simpler: returns candidates to try in place of one, the boldest first.
        key: returns the identity of a candidate.
    """
    search = ddmin(items(start))
    best, part = start, next(search, None)
    while part is not None:
        candidate = with_items(best, part)
        fails = yield candidate
        best = candidate if fails else best
        try:
            part = search.send(fails)
        except StopIteration:
            break
    return (yield from descend(best, simpler, key))
