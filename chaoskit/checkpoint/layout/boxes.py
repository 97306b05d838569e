"""Where a stored tensor lies: boxes of it, cut from the whole, at some offset of some bytes.

A piece of a training state is what one rank holds: boxes of tensors, each with the place of its bytes. Boxes of one
tensor may come from any number of ranks; which parts of which of them make up a wanted box is decided here, without
any I/O, so that a state can be read by a world of another size than the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from chaoskit.errors import ChaoskitError


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins, and how far it reaches, in each dimension."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements; 1 for a scalar, which has no dimensions."""
        return prod(self.extent)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.start, self.extent, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as an index into a tensor that holds ``outer``, which must enclose it."""
        return tuple(
            slice(first - origin, first - origin + length)
            for first, length, origin in zip(self.start, self.extent, outer.start, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if that is nothing."""
    start = tuple(map(max, one.start, other.start))
    stop = tuple(map(min, one.stop, other.stop))
    if any(last <= first for first, last in zip(start, stop, strict=True)):
        return None
    return Box(start, tuple(last - first for first, last in zip(start, stop, strict=True)))


def cover(wanted: Box, offered: Iterable[Box]) -> list[tuple[int, Box]]:
    """Which parts of which ``offered`` boxes make up ``wanted``: number of the offer, and the part.

    Offers may repeat each other, as the replicas of a tensor do: a part that came before is not taken again, if it is
    enclosed by what one offer gave. Boxes of one snapshot are equal or disjoint, so the result is exact for them.

    Raises:
        ChaoskitError: if the offers leave a hole.
    """
    taken: list[tuple[int, Box]] = []
    count = 0
    for number, box in enumerate(offered):
        part = overlap(wanted, box)
        if part is None or any(overlap(part, before) for _, before in taken):
            continue
        taken.append((number, part))
        count += part.size
        if count == wanted.size:
            break
    if count != wanted.size:
        raise ChaoskitError(
            f"{count} of {wanted.size} elements of the box at {wanted.start} are stored"
        )
    return taken
