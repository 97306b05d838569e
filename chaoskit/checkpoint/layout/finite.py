"""Numbers that must never be published: a look at them while they are in the cache anyway.

The sum of a few thousand numbers is finite exactly if all of them are, but for overflows; only where it is not they are
looked at one by one. Integers, bytes and types that torch cannot sum are not looked at.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from chaoskit.checkpoint.layout.arena import Slot, dtype_named

_SUMMED = (
    2**15 - 1
)  # elements; of fewer than 2**15 torch forms sums on the calling thread, however many it may use
SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# what is mapped to be read is only read here
warnings.filterwarnings(
    "ignore", "The given buffer is not writable", UserWarning, r"chaoskit\.checkpoint\.finite"
)


class Poisoned(Exception):
    """The state holds numbers that are not finite."""


def is_finite(values: Tensor, *, infinite: bool = False) -> bool:
    """Whether all of ``values``, in one dimension, are finite.

    Args:
        infinite: let infinity pass: only NaN is found.
    """
    if values.dtype not in SUMMABLE:
        return True
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    for part in values.split(_SUMMED if torch.get_num_threads() > 1 else max(1, values.numel())):
        if math.isfinite(float(part.sum(dtype=wide))):
            continue
        if bool(part.isnan().any() if infinite else (~part.isfinite()).any()):
            return False
    return True


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in tensors of one device, none of them empty: a few kernels for all of them together.

    It is finite exactly if all of them are. Nothing waits for the device.
    """
    return get_total_norm(tensors, math.inf)


class NanWatch:
    """Looks for NaN in the data of a state that passes by in pieces, from the first byte to the last.

    Infinity passes: masks are made of it. Pieces may end anywhere between two numbers.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = sorted(
            (slot for slot in slots if slot.size_bytes), key=lambda slot: slot.offset
        )
        self._next = 0  # the first slot that has not passed

    def look(self, place: int, data: memoryview) -> None:
        """``data`` begins at byte ``place``. Raises Poisoned, naming the tensor."""
        end = place + len(data)
        while self._next < len(self._slots) and (slot := self._slots[self._next]).offset < end:
            first, last = max(place, slot.offset), min(end, slot.offset + slot.size_bytes)
            if first < last:
                part = torch.frombuffer(
                    data[first - place : last - place], dtype=dtype_named(slot.dtype)
                )
                if not is_finite(part, infinite=True):
                    raise Poisoned(f"{slot.path} holds NaN")
            if slot.offset + slot.size_bytes > end:
                return
            self._next += 1
