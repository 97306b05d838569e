"""Checks for numbers that are not finite, made while the numbers are in the cache anyway.

The sum of a few thousand numbers is finite exactly if all of them are, apart from overflows. Only
where the sum is not finite are the numbers checked one by one. Integers, bytes and types that torch
cannot sum are not checked.

-> ``memory/tier.py`` and ``memory/copying.py``: a poisoned copy is left without a seal.
-> ``runtime/integrity/nonfinite_guard.py``: which rank or batch has caused such numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from chaoskit.checkpoint.layout.arena import Slot, dtype_named

# torch sums fewer than 2**15 elements on the calling thread, however many threads it may use
_SUMMED_MAX = 2**15 - 1
SUMMABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# buffers from read-only mappings are only read here
warnings.filterwarnings(
    "ignore", "The given buffer is not writable", UserWarning, re.escape(__name__)
)


class Poisoned(Exception):
    """The state holds numbers that are not finite."""


def is_finite(values: Tensor, *, allow_infinite: bool = False) -> bool:
    """Return True if all of ``values``, in one dimension, are finite.

    Values of a type that is not in :data:`SUMMABLE` always count as finite.

    Args:
        allow_infinite: accept infinity, and reject only NaN.
    """
    if values.dtype not in SUMMABLE:
        return True
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    for part in values.split(
        _SUMMED_MAX if torch.get_num_threads() > 1 else max(1, values.numel())
    ):
        if math.isfinite(float(part.sum(dtype=wide))):
            continue
        if bool(part.isnan().any() if allow_infinite else (~part.isfinite()).any()):
            return False
    return True


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in non-empty tensors of one device, as a tensor there.

    The result is finite exactly if all tensors are. This takes a few kernels for all tensors
    together, and the host does not wait for the device.
    """
    return get_total_norm(tensors, math.inf)


class NanWatch:
    """A check for NaN in the data of a state that is given in consecutive pieces.

    Infinity is accepted, because masks are made of it. Pieces may end between any two numbers.

    Args:
        slots: the slots of the state, which name the type of the numbers at each place.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = sorted(
            (slot for slot in slots if slot.size_bytes), key=lambda slot: slot.offset
        )
        self._next_slot = 0  # index of the first slot that is not checked completely

    def look(self, offset: int, data: memoryview) -> None:
        """Check the next piece of data, which begins at byte ``offset``.

        Raise Poisoned, which names the tensor, if there is NaN in it.
        """
        end = offset + len(data)
        while (
            self._next_slot < len(self._slots)
            and (slot := self._slots[self._next_slot]).offset < end
        ):
            first, last = max(offset, slot.offset), min(end, slot.offset + slot.size_bytes)
            if first < last:
                part = torch.frombuffer(
                    data[first - offset : last - offset], dtype=dtype_named(slot.dtype)
                )
                if not is_finite(part, allow_infinite=True):
                    raise Poisoned(f"{slot.path} holds NaN")
            if slot.offset + slot.size_bytes > end:
                return
            self._next_slot += 1
