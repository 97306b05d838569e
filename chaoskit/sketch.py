"""Sketches: what is written down of a training state, enough to see that it is another one, and in which tensor.

Of each tensor: how many of its values are not finite (of a buffer: are NaN, as masks hold infinities), its squared
2-norm, and 8 projections on vectors of signs, both without values that are not finite. All of these add up over the
boxes of a tensor that ranks hold, whatever the world is. An element's sign is the product of one sign for each of its
indices: made anew from the shape alone, on every machine. Each projection has every eighth row, so the sum of the
squares of all is an estimate of the squared 2-norm (Alon, Matias, Szegedy, "The space complexity of approximating the
frequency moments", 1996).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Vectors on which a tensor is projected. Two states that differ at random have equal projections with probability 0.
PROJECTIONS = 8


class TensorBox(NamedTuple):
    """A box of a tensor, in this rank's memory.

    Attributes:
        shape: of the whole tensor.
        start: first index of the box in each dimension.
        is_buffer: the model may have put it there for any purpose, such as a mask of infinities.
    """

    path: str
    memory: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    is_buffer: bool = False


def sketch(parts: Iterable[TensorBox]) -> dict[str, list[list[float]]]:
    """Return path -> start of the box, its extent, and the numbers: not finite, squared norm, projections."""
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
    values = part.memory.detach().cpu()
    values = values if values.dtype == torch.float64 else values.float()
    projections, wrong = _project(values, part.shape, part.start), 0
    if not all(
        map(math.isfinite, projections)
    ):  # else every value is finite, and need not be read again
        finite = torch.isfinite(values)
        wrong = int((values.isnan() if part.is_buffer else ~finite).sum())
        projections = _project(torch.where(finite, values, 0.0), part.shape, part.start)
        values = values[finite]
    norm = float(torch.linalg.vector_norm(values)) if values.numel() else 0.0
    return [float(wrong), norm**2, *projections]


def _project(values: Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> list[float]:
    """Projections of a box: one of several rows is made of every eighth of them, so all read each value once."""
    if not values.numel():
        return [0.0] * PROJECTIONS
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    if not wide:
        return [float(values)] + [0.0] * (PROJECTIONS - 1)
    shape, start = tuple(shape[dim] for dim in wide), tuple(start[dim] for dim in wide)
    values = values.reshape([values.shape[dim] for dim in wide])
    sums = values.double() if values.dim() == 1 else _sums_of_rows(values, shape[-1], start)
    for dim in range(sums.dim()):
        signs = _signs(dim, shape[dim])[0, start[dim] :][: values.shape[dim]]
        sums = sums * signs.reshape(-1, *[1] * (sums.dim() - 1 - dim))
    last = sums.dim() - 1
    owners = torch.arange(start[last], start[last] + sums.shape[-1]) % PROJECTIONS
    total = torch.zeros(PROJECTIONS, dtype=torch.float64).index_add_(
        0, owners, sums.reshape(-1, len(owners)).sum(0)
    )
    return [float(one) for one in total]


def _sums_of_rows(values: Tensor, size: int, start: tuple[int, ...]) -> Tensor:
    """Sum of each row (along the last dimension) with the signs of its projection, float64."""
    signs = _signs(-1, size)[:, start[-1] :][:, : values.shape[-1]].to(values.dtype)
    found = torch.empty(values.shape[:-1], dtype=torch.float64)
    for number in range(PROJECTIONS):
        mine = slice((number - start[-2]) % PROJECTIONS, None, PROJECTIONS)
        found[..., mine] = (values[..., mine, :] @ signs[number]).double()
    return found


@cache
def _signs(dim: int, size: int) -> Tensor:
    """Signs of one dimension (-1: along a row), float32 of shape (8, size)."""
    generator = torch.Generator().manual_seed(dim + 1)
    return torch.randint(0, 2, (PROJECTIONS, size), generator=generator).float() * 2 - 1
