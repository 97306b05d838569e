"""Boxes of tensors: the parts of stored boxes that make up a requested box."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.layout.boxes import Box, cover, overlap, whole
from chaoskit.errors import ChaoskitError


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape, and boxes that tile it: rows cut at random, each row of boxes cut at random
    again.
    """
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=4))})
    boxes = []
    for top, bottom in itertools.pairwise(row_cuts):
        column_cuts = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
        for left, right in itertools.pairwise(column_cuts):
            boxes.append(Box((top, left), (bottom - top, right - left)))
    return (rows, columns), draw(st.permutations(boxes))


@given(cuts(), cuts(), st.integers(0, 3))
def test_any_tiling_is_read_through_any_other(stored: object, wanted: object, repeats: int) -> None:
    shape, offers = stored  # type: ignore[misc]
    other_shape, boxes = wanted  # type: ignore[misc]
    full = torch.arange(shape[0] * shape[1]).view(shape)
    pieces = [full[box.within(whole(shape))].clone() for box in offers * (repeats + 1)]
    for box in boxes if other_shape == shape else [whole(shape)]:
        target = torch.full(box.extent, -1)
        for number, part in cover(box, offers * (repeats + 1)):
            piece = offers[number % len(offers)]
            target[part.within(box)] = pieces[number][part.within(piece)]
        assert torch.equal(target, full[box.within(whole(shape))])


@given(cuts())
def test_a_missing_box_is_a_hole(stored: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, offers = stored
    with pytest.raises(ChaoskitError, match="elements of the box"):
        cover(whole(shape), offers[1:])


def test_scalars_and_neighbours() -> None:
    assert cover(whole(()), [whole(())]) == [(0, whole(()))]
    assert overlap(Box((0,), (3,)), Box((3,), (2,))) is None
    assert overlap(Box((0, 2), (3, 3)), Box((2, 0), (3, 3))) == Box((2, 2), (1, 1))
