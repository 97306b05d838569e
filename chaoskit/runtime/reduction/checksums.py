"""Checksums of tensors' bits, cheap enough for every step.

They are made to find corruption, not to withstand an attacker. Bits are added as 8-byte words,
wrapping around, at the speed of memory. The sum of each tensor is multiplied by a different odd
number. The total changes if one tensor changes, or if two are exchanged.

-> integrity/rank_checks.py: which checksums ranks compare. checkpoint/layout/seal.py: the checksum
of a copy.
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
_BLOCK_WORDS = 2**20  # read at once from a tensor on a device
_ALL_ZERO = 0x5A5A_C3C3_0F0F_9696  # stands for 0, which means that there is no checksum


def checksum(tensors: Iterable[Tensor | None]) -> int:
    """Return a checksum of all bits, as an int64 that is never 0. ``None`` is skipped."""
    return _combine([_word(tensor, 0, _size(tensor)) for tensor in tensors if tensor is not None])


def slice_checksum(tensors: Iterable[Tensor], part: int, parts: int) -> int:
    """Return a checksum of one of ``parts`` slices of the tensors' bytes; never 0.

    The slices together cover each byte once.
    """
    tensor_ranges: list[tuple[Tensor, int, int]] = []
    end = 0
    for tensor in tensors:
        start, end = end, end + -(-_size(tensor) // _WORD_BYTES) * _WORD_BYTES
        tensor_ranges.append((tensor, start, end))
    words = end // _WORD_BYTES
    first, last = words * part // parts * _WORD_BYTES, words * (part + 1) // parts * _WORD_BYTES
    return _combine(
        [
            _word(tensor, max(first - start, 0), min(last - start, _size(tensor)))
            for tensor, start, stop in tensor_ranges
            if start < last and first < stop
        ]
    )


@torch.no_grad()
def bits_digest(tensor: Tensor) -> bytes:
    """Return a digest of one tensor's bits and their order. Exchanged values change it as well.

    It is empty for a tensor without elements. A tensor has other digests on a device than on the
    host.
    """
    if not tensor.numel():
        return b""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return xxhash.xxh3_128_digest(data.numpy().data)
    return ordered_sum(data).to_bytes(16, "little", signed=True)


def ordered_sum(data: Tensor) -> int:
    """Return the sum of the words of some bytes, each multiplied by a different odd number.

    It is computed on their device.
    """
    total = 0
    for number, block in enumerate(data.split(_BLOCK_WORDS * _WORD_BYTES)):
        padded = block.new_zeros(-(-len(block) // _WORD_BYTES) * _WORD_BYTES)
        padded[: len(block)] = block
        words = padded.view(torch.int64)
        odd_numbers = torch.arange(1, 2 * len(words), 2, device=words.device)
        total += (2 * number + 1) * int((words * odd_numbers).sum())
    return total


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of all tensors together, in bytes."""
    return sum(map(_size, tensors))


def row_checksums(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the checksum of each row of words.

    It is not 0 for a row of zeros, such as a row that never arrived.
    """
    return rows @ np.arange(1, 2 * rows.shape[1], 2) + _ALL_ZERO


def wrong_rows(rows: NDArray[np.int64]) -> list[int]:
    """Return the rows whose last word is not the checksum of the words before it."""
    wrong: list[int] = (row_checksums(rows[:, :-1]) != rows[:, -1]).nonzero()[0].tolist()
    return wrong


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@torch.no_grad()
def _word(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return the sum of the words in bytes ``start`` to ``stop``; ``start`` is a multiple of 8."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % _WORD_BYTES:
        flat = flat.clone()  # torch does not read unaligned words
    data = flat.view(torch.uint8)[start:stop]
    whole = len(data) // _WORD_BYTES * _WORD_BYTES
    word = data[:whole].view(torch.int64).sum()
    return word if whole == len(data) else word + data[whole:].sum()


def join(*words: int) -> int:
    """Return one int64 that identifies several words in their order; never 0."""
    return (
        int.from_bytes(
            hashlib.blake2b(repr(words).encode(), digest_size=_WORD_BYTES).digest(), signed=True
        )
        or 1
    )


def _combine(words: list[Tensor]) -> int:
    """Return one int64 for the words, which depends on their order; never 0."""
    total = 0
    for device in dict.fromkeys(word.device for word in words):  # step counts may stay on the host
        stacked = torch.stack([word for word in words if word.device == device])
        odd_numbers = torch.arange(1, 2 * len(stacked), 2, device=device)
        total = total * 31 + int((stacked * odd_numbers).sum())
    signed = (total + 2**63) % 2**64 - 2**63
    return signed or _ALL_ZERO
