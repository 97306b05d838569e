"""Slices of the state that ranks compare, one a step, read as ranges of the arena.

Two ranks may compare such slices only if the layouts of their arenas are equal, which the layouts'
digests show.

-> integrity/rank_checks.py: which slice is due. reduction/checksums.py: slices without an arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from chaoskit.checkpoint.layout.arena import ArenaView, decode_index

_SIGN = 2**63


class Range(NamedTuple):
    """A range of bytes of the arena's data, ``start`` to ``stop - 1``."""

    start: int
    stop: int


class ArenaSlices:
    """The slices of the state in an arena, which together cover each byte of its tensors once.

    Bytes between tensors belong to no slice: they may differ from rank to rank.

    Args:
        parts: the number of slices.
    """

    def __init__(self, arena: ArenaView, parts: int) -> None:
        self._arena, self._parts = arena, parts
        self._layout_bytes = b""
        self._slices: list[list[Range]] = []
        self._layout_digest = 0
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The size of all slices together, in bytes."""
        self._follow()
        return self._size_bytes

    @property
    def layout(self) -> int:
        """The digest of the layout, as an int64 that is never 0."""
        self._follow()
        return self._layout_digest

    def digest(self, part: int) -> int:
        """Return the XXH3 of the bytes of one slice, as an int64 that is never 0."""
        self._follow()
        data, hasher = self._arena.data(), xxhash.xxh3_64()
        for start, stop in self._slices[part]:
            hasher.update(data[start:stop])
        return _word(hasher)

    def _follow(self) -> None:
        """Cut the slices anew if a tensor came, went or was moved."""
        layout = self._arena.index_bytes()
        if layout == self._layout_bytes:
            return
        slots = decode_index(layout, self._arena.size_bytes)
        ranges = _merge(
            sorted(
                Range(slot.offset, slot.offset + slot.size_bytes)
                for slot in slots
                if slot.size_bytes
            )
        )
        self._slices = [_part(ranges, part, self._parts) for part in range(self._parts)]
        self._size_bytes = sum(slot.size_bytes for slot in slots)
        self._layout_bytes, self._layout_digest = layout, _word(xxhash.xxh3_64(layout))


def _merge(ranges: Sequence[Range]) -> list[Range]:
    """Return the sorted ranges, with adjacent ones joined."""
    merged: list[Range] = []
    for span in ranges:
        if merged and merged[-1].stop == span.start:
            merged[-1] = Range(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return merged


def _part(ranges: Sequence[Range], part: int, parts: int) -> list[Range]:
    """Return one of ``parts`` equal shares of the bytes in ``ranges``, in their order."""
    total = sum(stop - start for start, stop in ranges)
    first, last = total * part // parts, total * (part + 1) // parts
    shares, done = [], 0
    for start, stop in ranges:
        begin, end = max(first, done), min(last, done + stop - start)
        if begin < end:
            shares.append(Range(start + begin - done, start + end - done))
        done += stop - start
    return shares


def _word(hasher: xxhash.xxh3_64) -> int:
    """Return the digest as an int64 that is never 0."""
    return (hasher.intdigest() + _SIGN) % (2 * _SIGN) - _SIGN or 1
