"""Sketches of a training state: numbers that show that two states differ, and in which tensor.

The sketch of a tensor holds the number of its values that are not finite (in a buffer: that are
NaN, as masks hold infinities), its squared 2-norm, and 8 projections on vectors of signs. Norm and
projections leave out values that are not finite. All numbers add up over the boxes of a tensor that
ranks hold, whatever the world is. The sign of an element is the product of one sign for each of its
indices; it follows from the shape alone, on every machine. Each projection has every eighth row, so
the sum of the squares of all is an estimate of the squared 2-norm (Alon, Matias, Szegedy, "The
space complexity of approximating the frequency moments", 1996).

-> ``experiment/judge/comparison.py``: how the sketches of two runs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Number of vectors on which a tensor is projected. Two states that differ at random have equal
#: projections with probability 0.
PROJECTIONS = 8


class TensorBox(NamedTuple):
    """A box of a tensor, in this rank's memory.

    Attributes:
        path: path of the tensor in journals.
        memory: the values of the box.
        shape: shape of the whole tensor.
        start: first index of the box in each dimension.
        is_buffer: the tensor is a buffer, which may hold infinities on purpose, as masks do.
    """

    path: str
    memory: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    is_buffer: bool = False


def sketch(parts: Iterable[TensorBox]) -> dict[str, list[list[float]]]:
    """Return path -> start of the box, its extent, and its numbers, all as floats.

    The numbers are the count of values that are not finite (of a buffer, that are NaN), the squared
    norm, and the projections.
    """
    return {
        part.path: [
            list(map(float, part.start)),
            list(map(float, part.memory.shape)),
            _numbers(part),
        ]
        for part in parts
    }


@torch.no_grad()
def _numbers(part: TensorBox) -> list[float]:
    """Return the count of values that are not finite, the squared norm, and the projections."""
    values = part.memory.detach().cpu()
    values = values if values.dtype == torch.float64 else values.float()
    projections, non_finite_count = _project(values, part.shape, part.start), 0
    if not all(
        map(math.isfinite, projections)
    ):  # else every value is finite, and need not be read again
        finite = torch.isfinite(values)
        non_finite_count = int((values.isnan() if part.is_buffer else ~finite).sum())
        projections = _project(torch.where(finite, values, 0.0), part.shape, part.start)
        values = values[finite]
    norm = float(torch.linalg.vector_norm(values)) if values.numel() else 0.0
    return [float(non_finite_count), norm**2, *projections]


def _project(values: Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> list[float]:
    """Return the projections of a box.

    With several rows, each projection takes every eighth row, so each value is read once for all of
    them.
    """
    if not values.numel():
        return [0.0] * PROJECTIONS
    wide_dims = [dim for dim, size in enumerate(shape) if size > 1]
    if not wide_dims:
        return [float(values)] + [0.0] * (PROJECTIONS - 1)
    shape, start = tuple(shape[dim] for dim in wide_dims), tuple(start[dim] for dim in wide_dims)
    values = values.reshape([values.shape[dim] for dim in wide_dims])
    sums = values.double() if values.dim() == 1 else _sums_of_rows(values, shape[-1], start)
    for dim in range(sums.dim()):
        signs = _signs(dim, shape[dim])[0, start[dim] :][: values.shape[dim]]
        sums = sums * signs.reshape(-1, *[1] * (sums.dim() - 1 - dim))
    last = sums.dim() - 1
    owners = torch.arange(start[last], start[last] + sums.shape[-1]) % PROJECTIONS
    total = torch.zeros(PROJECTIONS, dtype=torch.float64).index_add_(
        0, owners, sums.reshape(-1, len(owners)).sum(0)
    )
    return [float(projection) for projection in total]


def _sums_of_rows(values: Tensor, size: int, start: tuple[int, ...]) -> Tensor:
    """Return the sum of each row with the signs of its projection, float64."""
    signs = _signs(-1, size)[:, start[-1] :][:, : values.shape[-1]].to(values.dtype)
    sums = torch.empty(values.shape[:-1], dtype=torch.float64)
    for number in range(PROJECTIONS):
        rows = slice((number - start[-2]) % PROJECTIONS, None, PROJECTIONS)
        sums[..., rows] = (values[..., rows, :] @ signs[number]).double()
    return sums


@cache
def _signs(dim: int, size: int) -> Tensor:
    """Return the signs of one dimension (-1: along a row), float32 of shape (8, size)."""
    generator = torch.Generator().manual_seed(dim + 1)
    return torch.randint(0, 2, (PROJECTIONS, size), generator=generator).float() * 2 - 1
