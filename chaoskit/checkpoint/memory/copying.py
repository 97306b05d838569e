"""One copy from tensors into a slot, in chunks that two threads share, with its checksum and a look for NaN.

The thread that copies digests each chunk while it is in the cache. The training thread, once it has nothing else to do,
copies chunks, too, and digests none: training never waits for a checksum.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaImage, Slot, dtype_named
from chaoskit.checkpoint.layout.finite import Poisoned, is_finite
from chaoskit.checkpoint.layout.held import HeldTensor
from chaoskit.checkpoint.layout.seal import Checksum
from chaoskit.checkpoint.memory.pipeline import Pipeline

#: A chunk, its copy and the code fit into the second-level cache of one core.
CHUNK_BYTES = 2**19


class Chunk(NamedTuple):
    """Bytes of a tensor. ``offset`` counts from the start of the tensor, ``place`` from the start of the data."""

    tensor: int
    offset: int
    place: int
    size_bytes: int


def cut(tensors: Sequence[HeldTensor], slots: Sequence[Slot]) -> list[Chunk]:
    """Chunks of all tensors, in the order in which they lie. A tensor with gaps is one chunk, whatever its size."""
    chunks = []
    for number, (held, slot) in enumerate(zip(tensors, slots, strict=True)):
        step_bytes = CHUNK_BYTES if held.tensor.is_contiguous() else max(slot.size_bytes, 1)
        for offset in range(0, slot.size_bytes, step_bytes):
            size_bytes = min(step_bytes, slot.size_bytes - offset)
            chunks.append(Chunk(number, offset, slot.offset + offset, size_bytes))
    return chunks


class Copying:
    """One copy under way. One thread calls :meth:`run`; another one may call :meth:`finish_copy` meanwhile.

    Args:
        image: taken, and begun.
        arrive: returns when tensors on other devices, whose copies were started elsewhere, are here, and whether they
            were found to be finite there. Else they are looked at here, which also names the one that is not.
    """

    def __init__(
        self,
        tensors: Sequence[HeldTensor],
        slots: Sequence[Slot],
        chunks: Sequence[Chunk],
        image: ArenaImage,
        digest: Checksum,
        *,
        check_finite: bool = False,
        arrive: Callable[[], bool] | None = None,
    ) -> None:
        self._tensors, self._slots, self._chunks = tensors, slots, chunks
        self._image, self._digest = image, digest
        self._check_finite, self._arrive = check_finite, arrive
        self._device_is_finite = False
        self._base = image.address
        self._digested = 0  # bytes
        self._pipeline = Pipeline(len(chunks), self._copy, self._digest_chunk)

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed; None if it did not, or is under way."""
        return self._pipeline.error

    def run(self, after_chunk: Callable[[int], None]) -> str:
        """Copy what is left and digest all of it; returns the checksum.

        Args:
            after_chunk: told the number of each chunk that this thread has copied.

        Raises:
            Poisoned: if the state is not finite, and that is asked. Else whatever copying raises.
        """
        self._pipeline.run(after_chunk, in_turn=self._arrive is None)
        if self._arrive is not None:
            self._device_is_finite = self._arrive()
        self._pipeline.finish()
        self._digest_bytes(self._image.size_bytes)  # with the gap behind the last tensor
        return self._digest.hexdigest()

    def finish_copy(self) -> None:
        """Help until all is copied or copying has failed."""
        self._pipeline.help()

    def _copy(self, number: int) -> None:
        chunk = self._chunks[number]
        self._move(self._tensors[chunk.tensor].tensor, self._slots[chunk.tensor], chunk)

    def _move(self, tensor: Tensor, slot: Slot, chunk: Chunk) -> None:
        if tensor.nbytes != slot.size_bytes:
            raise RuntimeError(
                f"{slot.path} has {tensor.nbytes} bytes, and had {slot.size_bytes} when it was laid out"
            )
        if tensor.is_cuda:
            return
        if tensor.is_contiguous():  # not by torch, which would wake threads of its own for this
            ctypes.memmove(
                self._base + chunk.place, tensor.data_ptr() + chunk.offset, chunk.size_bytes
            )
        else:
            self._image.tensor(slot).copy_(tensor.detach())

    def _digest_chunk(self, number: int) -> None:
        chunk = self._chunks[number]
        if self._check_finite:
            self._look_at(chunk)
        self._digest_bytes(chunk.place + chunk.size_bytes)

    def _digest_bytes(self, end: int) -> None:
        data = self._image.bytes
        while self._digested < end:
            stop = min(end, self._digested + CHUNK_BYTES)
            self._digest.update(data[DATA_OFFSET + self._digested : DATA_OFFSET + stop])
            self._digested = stop

    def _look_at(self, chunk: Chunk) -> None:
        slot = self._slots[chunk.tensor]
        if self._device_is_finite and self._tensors[chunk.tensor].tensor.is_cuda:
            return
        if not is_finite(self._view(chunk.place, chunk.size_bytes, slot.dtype)):
            raise Poisoned(f"{slot.path} is not finite")

    def _view(self, place: int, size_bytes: int, dtype: str) -> Tensor:
        start = DATA_OFFSET + place
        return torch.frombuffer(
            self._image.map, dtype=torch.uint8, count=size_bytes, offset=start
        ).view(dtype_named(dtype))
