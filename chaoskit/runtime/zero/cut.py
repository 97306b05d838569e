"""Which rank updates which rows of which parameter. Pure: knows neither tensors nor ranks' connections.

All parameters lie one behind the other, as in :class:`chaoskit.runtime.gradients.FlatLayout`. Each rank has a
contiguous part of that, all of nearly the same size. Parts end between rows: what a rank has of a parameter is a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from chaoskit.checkpoint.layout import Box
from chaoskit.runtime.gradients import ALIGNMENT, FlatLayout


class Unit(NamedTuple):
    """What is never cut: of one parameter, so many elements each, so many of them; the last one may be shorter."""

    elements: int
    units: int


class Slice(NamedTuple):
    """What one rank has of a parameter.

    Args:
        number: of the parameter, in the order of registration.
        start, stop: where it lies among all parameters, in elements.
        box: the same as a part of the parameter.
        unit: of the parameter, the number of the first one.
    """

    number: int
    start: int
    stop: int
    box: Box
    unit: int


def unit_of(shape: Sequence[int]) -> Unit:
    """A row; of a vector a few elements."""
    size = prod(shape)
    if not size:
        return Unit(1, 0)
    elements = size // shape[0] if len(shape) > 1 else ALIGNMENT
    return Unit(elements, -(-size // elements))


def cut(layout: FlatLayout, parts: int) -> tuple[int, ...]:
    """Where the parts begin, and where the last one ends: ``parts + 1`` places, ascending; parts may be empty."""
    places = sorted((start, unit_of(shape)) for start, shape in zip(layout.starts, layout.shapes, strict=True))
    places = [(start, unit) for start, unit in places if unit.units] or [(0, Unit(1, 0))]
    ends = [start for start, _ in places[1:]] + [layout.numel]
    found, at = [0], 0
    for part in range(1, parts):
        target = layout.numel * part // parts
        while ends[at] < target:
            at += 1
        start, unit = places[at]
        whole = round((target - start) / unit.elements)
        found.append(start + whole * unit.elements if whole < unit.units else ends[at])
    return (*found, layout.numel)


def slices(layout: FlatLayout, start: int, stop: int) -> list[Slice]:
    """What lies between two places of the parameters, in the order of registration."""
    found = []
    for number, shape in enumerate(layout.shapes):
        first, unit = layout.starts[number], unit_of(shape)
        low, high = max(start, first), min(stop, first + prod(shape))
        if low < high:
            box = _box(tuple(shape), low - first, high - first, unit)
            found.append(Slice(number, low, high, box, (low - first) // unit.elements))
    return found


def _box(shape: tuple[int, ...], low: int, high: int, unit: Unit) -> Box:
    if not shape:
        return Box((), ())
    if len(shape) == 1:
        return Box((low,), (high - low,))
    rows = (high - low) // unit.elements
    return Box((low // unit.elements, *(0 for _ in shape[1:])), (rows, *shape[1:]))
