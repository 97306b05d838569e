"""Boxes of tensors: the parts that ranks hold, and how a box is put together from others.

A piece of a training state is the part that one rank holds: boxes of tensors, each with the place
of its bytes. Boxes of one tensor may come from any number of ranks. This module computes which
parts of them make up another box, without any I/O. A state can thus be read by a world of another
size than the one that wrote it.

-> ``disk/snapshot.py`` and ``memory/stored.py``: read these parts.
-> ``runtime/state/sharding.py``: which boxes a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from chaoskit.errors import ChaoskitError


class Box(NamedTuple):
    """A rectangular part of a tensor: its start and its extent in each dimension."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements; 1 for a scalar, which has no dimensions."""
        return prod(self.extent)

    @property
    def stop(self) -> tuple[int, ...]:
        """The position behind the last element in each dimension."""
        return tuple(first + length for first, length in zip(self.start, self.extent, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return this box as an index into a tensor that holds ``outer``, which must enclose it."""
        return tuple(
            slice(first - origin, first - origin + length)
            for first, length, origin in zip(self.start, self.extent, outer.start, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), shape)


def overlap(first_box: Box, second_box: Box) -> Box | None:
    """Return the common part of two boxes of one tensor; None if there is none."""
    start = tuple(map(max, first_box.start, second_box.start))
    stop = tuple(map(min, first_box.stop, second_box.stop))
    if any(last <= first for first, last in zip(start, stop, strict=True)):
        return None
    return Box(start, tuple(last - first for first, last in zip(start, stop, strict=True)))


def cover(target: Box, offered: Iterable[Box]) -> list[tuple[int, Box]]:
    """Return the parts of ``offered`` boxes that make up ``target``, with the index of the offer.

    Offers may repeat each other, as the replicas of a tensor do. A part that overlaps an earlier
    one is skipped. Boxes of one snapshot are equal or disjoint, so the result is exact for them.

    Raises:
        ChaoskitError: if the offers leave a hole.
    """
    parts: list[tuple[int, Box]] = []
    covered_elements = 0
    for index, box in enumerate(offered):
        part = overlap(target, box)
        if part is None or any(overlap(part, before) for _, before in parts):
            continue
        parts.append((index, part))
        covered_elements += part.size
        if covered_elements == target.size:
            break
    if covered_elements != target.size:
        raise ChaoskitError(
            f"{covered_elements} of {target.size} elements of the box at {target.start} are stored"
        )
    return parts
