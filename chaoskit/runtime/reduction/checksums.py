"""Checksums of tensors' bits: cheap enough for every step, made to find corruption, not to withstand an attacker.

Bits are added as 8-byte words, wrapping around, at the speed of memory. Each tensor's sum is multiplied by an odd
number of its own: one that changes changes the total, and two that are exchanged do, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_WORD_BYTES = 8
_BLOCK_WORDS = 2**20  # on a device, of a tensor that is read at once
_ALL_ZERO = 0x5A5A_C3C3_0F0F_9696  # stands for 0, which means that there is no checksum


def checksum(tensors: Iterable[Tensor | None]) -> int:
    """Of all bits, as an int64 that is never 0. ``None`` is passed over."""
    return _combine([_word(tensor, 0, _size(tensor)) for tensor in tensors if tensor is not None])


def slice_checksum(tensors: Iterable[Tensor], part: int, parts: int) -> int:
    """Of one of ``parts`` slices of the tensors' bytes, which together cover each byte once; never 0."""
    places: list[tuple[Tensor, int, int]] = []
    end = 0
    for tensor in tensors:
        start, end = end, end + -(-_size(tensor) // _WORD_BYTES) * _WORD_BYTES
        places.append((tensor, start, end))
    words = end // _WORD_BYTES
    first, last = words * part // parts * _WORD_BYTES, words * (part + 1) // parts * _WORD_BYTES
    return _combine(
        [
            _word(tensor, max(first - start, 0), min(last - start, _size(tensor)))
            for tensor, start, stop in places
            if start < last and first < stop
        ]
    )


@torch.no_grad()
def bits_digest(tensor: Tensor) -> bytes:
    """Return a digest of one tensor's bits and their order. Values that change places change it, too."""
    if not tensor.numel():
        return b""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return xxhash.xxh3_128_digest(data.numpy().data)
    return ordered_sum(data).to_bytes(16, "little", signed=True)


def ordered_sum(data: Tensor) -> int:
    """Return the sum of the words of some bytes, each times an odd number of its own; on their device."""
    total = 0
    for number, block in enumerate(data.split(_BLOCK_WORDS * _WORD_BYTES)):
        padded = block.new_zeros(-(-len(block) // _WORD_BYTES) * _WORD_BYTES)
        padded[: len(block)] = block
        words = padded.view(torch.int64)
        odd = torch.arange(1, 2 * len(words), 2, device=words.device)
        total += (2 * number + 1) * int((words * odd).sum())
    return total


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all tensors together."""
    return sum(map(_size, tensors))


def row_checksums(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each row of words. Not 0 for a row of zeros, as one that never arrived is."""
    return rows @ np.arange(1, 2 * rows.shape[1], 2) + _ALL_ZERO


def wrong_rows(rows: NDArray[np.int64]) -> list[int]:
    """Those whose last word is not the checksum of the words before it."""
    found: list[int] = (row_checksums(rows[:, :-1]) != rows[:, -1]).nonzero()[0].tolist()
    return found


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def _word(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The sum of the words in bytes ``start`` to ``stop``; ``start`` is a multiple of 8."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()  # torch does not read words that straddle
    data = flat.view(torch.uint8)[start:stop]
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    word = data[:whole].view(torch.int64).sum()
    return word if whole == len(data) else word + data[whole:].sum()


def join(*words: int) -> int:
    """One int64 for several; never 0."""
    return (
        int.from_bytes(
            hashlib.blake2b(repr(words).encode(), digest_size=_WORD_BYTES).digest(), signed=True
        )
        or 1
    )


def _combine(words: list[Tensor]) -> int:
    total = 0
    for device in dict.fromkeys(
        word.device for word in words
    ):  # an optimizer's step counts may stay on the host
        found = torch.stack([word for word in words if word.device == device])
        odd = torch.arange(1, 2 * len(found), 2, device=device)
        total = total * 31 + int((found * odd).sum())
    signed = (total + 2**63) % 2**64 - 2**63
    return signed or _ALL_ZERO
