"""Making a failing thing smaller: searches that ask about one candidate at a time and know nothing of processes.

A search is a generator. It yields a candidate, is sent whether that one fails, and returns the smallest that did. The
best so far is always the last candidate that failed (at first: what the search began with), so whoever drives it can
stop at any moment. Nothing is asked twice of the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

Search = Generator[T, bool, T]


def ddmin(items: Sequence[T]) -> Search[tuple[T, ...]]:
    """Delta debugging of a list that fails as a whole (A. Zeller and R. Hildebrandt, 2002).

    The result is 1-minimal, as far as the answers are right: without any one of its items it does not fail.
    """
    best, parts = tuple(items), 2
    refuted: set[tuple[int, ...]] = (
        set()
    )  # by the places of their items, as equal items are two things
    places = tuple(range(len(best)))
    everything = best
    while places:
        for candidate in _cuts(places, parts):
            if candidate in refuted:
                continue
            if (yield tuple(everything[place] for place in candidate)):
                parts = max(2, parts - 1) if len(candidate) > len(places) // 2 else 2
                places = candidate
                break
            refuted.add(candidate)
        else:
            if parts >= len(places):
                break
            parts = min(len(places), 2 * parts)
    return tuple(everything[place] for place in places)


def _cuts(places: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Each of ``parts`` pieces, then everything but each piece. Of a single place: nothing at all."""
    if len(places) == 1:
        return [()]
    edges = [len(places) * number // parts for number in range(parts + 1)]
    pieces = [places[start:end] for start, end in pairwise(edges) if start < end]
    rests = [tuple(place for place in places if place not in piece) for piece in pieces]
    return pieces + [rest for rest in rests if rest not in pieces]


def descend(start: T, simpler: Callable[[T], Iterable[T]], key: Callable[[T], object]) -> Search[T]:
    """Go to a simpler candidate that fails, from there to a simpler one, until none of them fails.

    Args:
        simpler: candidates to try in place of one, the boldest first. Must not lead in circles.
        key: what tells candidates apart; a refuted one is not tried again.
    """
    best, refuted = start, {key(start)}
    moved = True
    while moved:
        moved = False
        for candidate in simpler(best):
            if key(candidate) in refuted:
                continue
            refuted.add(key(candidate))
            if (yield candidate):
                best, moved = candidate, True
                break
    return best


def minimise(
    start: T,
    items: Callable[[T], Sequence[object]],
    with_items: Callable[[T, Sequence[object]], T],
    simpler: Callable[[T], Iterable[T]],
    key: Callable[[T], object],
) -> Search[T]:
    """First :func:`ddmin` over the items of ``start``, then :func:`descend` from what is left."""
    search = ddmin(items(start))
    best, kept = start, next(search, None)
    while kept is not None:
        candidate = with_items(best, kept)
        fails = yield candidate
        best = candidate if fails else best
        try:
            kept = search.send(fails)
        except StopIteration:
            break
    return (yield from descend(best, simpler, key))
