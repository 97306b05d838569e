"""Copy tensors into a slot, in chunks that two threads share, with a checksum and a check for NaN.

The copying thread digests each chunk while the chunk is in the cache. The training thread, once it
has nothing else to do, copies chunks as well but digests none: training never waits for a checksum.

-> ``memory/pipeline.py``: the order of the chunks. ``memory/device.py``: copies of CUDA tensors.
-> ``memory/snapshotter.py``: starts a copy, and seals or drops it.
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
    """A range of bytes of a tensor.

    Args:
        tensor_index: index of the tensor.
        offset: start of the range in the tensor.
        slot_offset: start of the range in the data of the slot.
        size_bytes: length of the range.
    """

    tensor_index: int
    offset: int
    slot_offset: int
    size_bytes: int


def cut_into_chunks(tensors: Sequence[HeldTensor], slots: Sequence[Slot]) -> list[Chunk]:
    """Return the chunks of all tensors, in the order of their places in the slot.

    A tensor with gaps in its memory is one chunk, whatever its size.
    """
    chunks = []
    for tensor_index, (held, slot) in enumerate(zip(tensors, slots, strict=True)):
        chunk_bytes = CHUNK_BYTES if held.tensor.is_contiguous() else max(slot.size_bytes, 1)
        for offset in range(0, slot.size_bytes, chunk_bytes):
            size_bytes = min(chunk_bytes, slot.size_bytes - offset)
            chunks.append(Chunk(tensor_index, offset, slot.offset + offset, size_bytes))
    return chunks


class Copying:
    """A copy of tensors into a slot, which ends with the checksum of the data.

    One thread calls :meth:`run`; another one may call :meth:`finish_copy` meanwhile.

    Args:
        tensors: the tensors to copy.
        slots: place of each tensor in the data, in the same order.
        chunks: the chunks of :func:`cut_into_chunks`.
        image: the slot to fill, which is locked and whose header is begun.
        digest: checksum to which the data is added.
        check_finite: raise Poisoned for NaN and infinity.
        arrive: waits for the tensors whose copies from other devices were started elsewhere.
            Returns True if the device found all of them finite; otherwise they are checked here,
            which also names the tensor that is not.
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
        self._image_address = image.address
        self._digested_bytes = 0
        self._pipeline = Pipeline(len(chunks), self._copy, self._digest_chunk)

    @property
    def error(self) -> BaseException | None:
        """The error that made the copy fail; None if the copy succeeded or is under way."""
        return self._pipeline.error

    def run(self, after_chunk: Callable[[int], None]) -> str:
        """Copy the chunks that are left, digest all data, and return the checksum in hexadecimal.

        Args:
            after_chunk: called with the number of each chunk that this thread has copied.

        Raises:
            Poisoned: if the state is not finite and ``check_finite`` is set.
            Exception: any error of the copy itself.
        """
        self._pipeline.run(after_chunk, in_turn=self._arrive is None)
        if self._arrive is not None:
            self._device_is_finite = self._arrive()
        self._pipeline.finish()
        self._digest_bytes(self._image.size_bytes)  # with the gap behind the last tensor
        return self._digest.hexdigest()

    def finish_copy(self) -> None:
        """Copy chunks on this thread, too. Return when all are copied or a copy has failed.

        No error is raised here: see :attr:`error`.
        """
        self._pipeline.help()

    def _copy(self, number: int) -> None:
        """Copy the chunk with this number; see :meth:`_move`."""
        chunk = self._chunks[number]
        self._move(self._tensors[chunk.tensor_index].tensor, self._slots[chunk.tensor_index], chunk)

    def _move(self, tensor: Tensor, slot: Slot, chunk: Chunk) -> None:
        """Copy a chunk, by ``memmove`` if its tensor is contiguous.

        CUDA tensors are left out, because the device copies them itself. Raise RuntimeError if the
        size of the tensor has changed.
        """
        if tensor.nbytes != slot.size_bytes:
            raise RuntimeError(
                f"{slot.path} has {tensor.nbytes} bytes, and had {slot.size_bytes} when it was laid out"
            )
        if tensor.is_cuda:
            return
        if tensor.is_contiguous():  # torch would start threads of its own for this
            ctypes.memmove(
                self._image_address + chunk.slot_offset,
                tensor.data_ptr() + chunk.offset,
                chunk.size_bytes,
            )
        else:
            self._image.tensor(slot).copy_(tensor.detach())

    def _digest_chunk(self, number: int) -> None:
        """Add a copied chunk to the checksum. Raise Poisoned if it must be finite and is not."""
        chunk = self._chunks[number]
        if self._check_finite:
            self._require_finite(chunk)
        self._digest_bytes(chunk.slot_offset + chunk.size_bytes)

    def _digest_bytes(self, end: int) -> None:
        """Add the data up to ``end`` to the checksum, in pieces of a chunk."""
        data = self._image.bytes
        while self._digested_bytes < end:
            stop = min(end, self._digested_bytes + CHUNK_BYTES)
            self._digest.update(data[DATA_OFFSET + self._digested_bytes : DATA_OFFSET + stop])
            self._digested_bytes = stop

    def _require_finite(self, chunk: Chunk) -> None:
        """Raise Poisoned if a chunk is not finite.

        Tensors that the device has checked are skipped.
        """
        slot = self._slots[chunk.tensor_index]
        if self._device_is_finite and self._tensors[chunk.tensor_index].tensor.is_cuda:
            return
        if not is_finite(self._slot_part(chunk.slot_offset, chunk.size_bytes, slot.dtype)):
            raise Poisoned(f"{slot.path} is not finite")

    def _slot_part(self, slot_offset: int, size_bytes: int, dtype: str) -> Tensor:
        """Return the part of the slot from ``slot_offset`` on as a tensor, without a copy."""
        start = DATA_OFFSET + slot_offset
        return torch.frombuffer(
            self._image.map, dtype=torch.uint8, count=size_bytes, offset=start
        ).view(dtype_named(dtype))
