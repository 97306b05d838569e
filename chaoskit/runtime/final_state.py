"""What is written down of the state with which a job ends: enough to see that it is another one, and in which tensor.

Of each tensor: how many of its values are not finite (buffers apart), its squared 2-norm, and 8 projections on vectors
of signs, both without these values. All of these add up over the boxes of a tensor that ranks hold, whatever the world
is. A vector has one sign for each index of each dimension, and their product for an element: made anew from the shape
alone, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Vectors on which a tensor is projected. Two states that differ at random have equal projections with probability 0.
PROJECTIONS = 8


class Part(NamedTuple):
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


def describe(parts: Iterable[Part]) -> dict[str, list[list[float]]]:
    """Return path -> start of the box, its extent, and the numbers: not finite, squared norm, projections."""
    return {
        part.path: [list(map(float, part.start)), list(map(float, part.memory.shape)), _numbers(part)] for part in parts
    }


@torch.no_grad()
def _numbers(part: Part) -> list[float]:
    values = part.memory.detach().cpu()
    values = values if values.dtype == torch.float64 else values.float()
    projections, wrong = _project(values, part.shape, part.start), 0
    if not bool(torch.isfinite(projections).all()):  # else every value is finite, and need not be read again
        finite = torch.isfinite(values)
        wrong = values.numel() - int(finite.sum())
        projections = _project(torch.where(finite, values, 0.0), part.shape, part.start)
        values = values[finite]
    norm = float(torch.linalg.vector_norm(values)) if values.numel() else 0.0
    return [0.0 if part.is_buffer else float(wrong), norm**2, *projections.tolist()]


def _project(values: Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> Tensor:
    """Projections of a box, float64 of shape (8,)."""
    if not values.dim():
        return values.double().expand(PROJECTIONS)
    signs = [
        _signs(dim, size)[begin : begin + extent]
        for dim, (size, begin, extent) in enumerate(zip(shape, start, values.shape, strict=True))
    ]
    found = (values @ signs[-1].to(values.dtype)).double()
    for one in reversed(signs[:-1]):
        found = (found * one.double()).sum(-2)
    return found


@cache
def _signs(dim: int, size: int) -> Tensor:
    """Signs of one dimension, float32 of shape (size, 8)."""
    generator = torch.Generator().manual_seed(dim)
    return torch.randint(0, 2, (size, PROJECTIONS), generator=generator).float() * 2 - 1
