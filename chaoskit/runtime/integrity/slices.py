"""Slices of the state that ranks compare, one a step, read as ranges of the arena instead of one tensor after another.

Two ranks may compare such slices only if their arenas are laid out alike, which their layouts' digests tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from chaoskit.checkpoint.layout.arena import ArenaView, decode_index

_SIGN = 2**63


class Range(NamedTuple):
    """Bytes of the arena's data."""

    start: int
    stop: int


class ArenaSlices:
    """The slices of the state in an arena, which together cover each byte of its tensors once.

    What lies between tensors belongs to none: it may differ from rank to rank.
    """

    def __init__(self, arena: ArenaView, parts: int) -> None:
        self._arena, self._parts = arena, parts
        self._index = b""
        self._slices: list[list[Range]] = []
        self._layout = 0
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Of all slices together."""
        self._follow()
        return self._size_bytes

    @property
    def layout(self) -> int:
        """Digest of what lies where, as an int64 that is never 0."""
        self._follow()
        return self._layout

    def digest(self, part: int) -> int:
        """XXH3 over the bytes of one slice, as an int64 that is never 0."""
        self._follow()
        data, hasher = self._arena.data(), xxhash.xxh3_64()
        for start, stop in self._slices[part]:
            hasher.update(data[start:stop])
        return _word(hasher)

    def _follow(self) -> None:
        """Cut anew where a tensor came, went or was moved."""
        index = self._arena.index_bytes()
        if index == self._index:
            return
        slots = decode_index(index, self._arena.size_bytes)
        ranges = _merge(
            sorted(
                Range(slot.offset, slot.offset + slot.size_bytes)
                for slot in slots
                if slot.size_bytes
            )
        )
        self._slices = [_part(ranges, part, self._parts) for part in range(self._parts)]
        self._size_bytes = sum(slot.size_bytes for slot in slots)
        self._index, self._layout = index, _word(xxhash.xxh3_64(index))


def _merge(ranges: Sequence[Range]) -> list[Range]:
    """Ranges that touch become one."""
    merged: list[Range] = []
    for one in ranges:
        if merged and merged[-1].stop == one.start:
            merged[-1] = Range(merged[-1].start, one.stop)
        else:
            merged.append(one)
    return merged


def _part(ranges: Sequence[Range], part: int, parts: int) -> list[Range]:
    """One of ``parts`` equal shares of the bytes in ``ranges``, which are put one behind the other."""
    total = sum(stop - start for start, stop in ranges)
    first, last = total * part // parts, total * (part + 1) // parts
    found, done = [], 0
    for start, stop in ranges:
        begin, end = max(first, done), min(last, done + stop - start)
        if begin < end:
            found.append(Range(start + begin - done, start + end - done))
        done += stop - start
    return found


def _word(hasher: xxhash.xxh3_64) -> int:
    return (hasher.intdigest() + _SIGN) % (2 * _SIGN) - _SIGN or 1
