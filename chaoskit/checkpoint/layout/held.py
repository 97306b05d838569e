"""The tensors of a state that one rank holds, and their layout in memory that others can read.

-> ``runtime/state/sharding.py``: which tensors and boxes a rank of a sharded job holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.checkpoint.layout.arena import Slot, aligned
from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.errors import BadInput


class HeldTensor(NamedTuple):
    """A tensor, or the box of a sharded one that this rank holds.

    Args:
        path: its name in the state, such as ``model.head.weight``; the same on every rank.
        tensor: a plain dense tensor, on CPU or CUDA; of a ``DTensor`` the local one.
        whole: shape of the sharded tensor; empty for a tensor that is held whole.
        start: position of the box in the sharded tensor.
    """

    path: str
    tensor: Tensor
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def box(self) -> Box:
        """The part of the tensor that is held."""
        return Box(self.start or (0,) * self.tensor.dim(), tuple(self.tensor.shape))


def lay_out(tensors: Sequence[HeldTensor]) -> tuple[list[Slot], int]:
    """Return the slots of the tensors, in this order, and the size of the data in bytes.

    Raises:
        BadInput: if two tensors have the same path and start, or one cannot be copied byte by byte.
            Also if ``whole``, ``start`` and the tensor differ in their number of dimensions.
    """
    slots: list[Slot] = []
    keys: set[tuple[str, tuple[int, ...]]] = set()
    offset = 0
    for held in tensors:
        _require_copyable(held)
        if (key := (held.path, held.box.start)) in keys:
            raise BadInput("tensors", held.path, "give every tensor a path of its own")
        keys.add(key)
        dtype = str(held.tensor.dtype).removeprefix("torch.")
        slot = Slot(
            held.path, dtype, tuple(held.tensor.shape), offset, tuple(held.whole), tuple(held.start)
        )
        slots.append(slot)
        offset += aligned(slot.size_bytes)
    return slots, offset


def _require_copyable(held: HeldTensor) -> None:
    """Raise BadInput if a tensor cannot be copied byte by byte, or its box has no valid shape."""
    tensor = held.tensor
    if (
        type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        or tensor.layout != torch.strided
    ):
        name = type(tensor).__name__ if type(tensor) is not Tensor else str(tensor.layout)
        raise BadInput(
            "tensors",
            f"{held.path} ({name})",
            "pass plain dense tensors; of a DTensor the local one",
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise BadInput("tensors", f"{held.path} on {tensor.device}", "pass tensors on CPU or CUDA")
    if held.whole and not len(held.whole) == len(held.start) == tensor.dim():
        raise BadInput(
            "tensors", held.path, "give whole, start and the tensor the same number of dimensions"
        )
