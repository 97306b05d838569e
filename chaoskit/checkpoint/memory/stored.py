"""Read the copies in slots, after the death of their writer, into tensors of any cut.

    with StoredCopy(path) as copy:
        scalars = copy.read_into(tensors)

A copy is complete or invisible. Its bytes are verified as they are read. A damaged copy raises, and
the tensors that it was read into must be read again from another copy.

-> ``runtime/state/pieces.py``: a rank of a sharded job chooses among the copies, and tries another.
-> ``runtime/state/peer.py``: a copy on another host is fetched first.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaView, Slot, decode_index, dtype_named
from chaoskit.checkpoint.layout.boxes import cover
from chaoskit.checkpoint.layout.held import HeldTensor, lay_out
from chaoskit.checkpoint.layout.manifest import Damaged
from chaoskit.checkpoint.layout.seal import Checksum, Seal, Torn
from chaoskit.checkpoint.memory.pipeline import Pipeline
from chaoskit.errors import ChaoskitError

_BATCH_BYTES = 2**20  # read at once, and digested while in the cache
_BATCH_PIECES = 512  # the kernel takes 1024


class StoredCopy:
    """A sealed copy in a slot. The slot is not overwritten while this object is open.

    Args:
        path: path at which this process can open the slot, such as ``/proc/PID/fd/N``.

    Attributes:
        view: the mapped slot.
        seal: seal of the copy.
        index, scalars: its encoded index and scalars, not verified.
        slots: the decoded index: the place of each tensor in the data.

    Raises:
        Torn: if there is no complete copy in the slot, or it is being written.
        Damaged: if the seal or the index of the copy was changed.
        OSError: if there is no such slot.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.view = ArenaView.open(path)
        try:
            self._lock_and_read_header(path)
        except BaseException:
            self.close()
            raise

    def _lock_and_read_header(self, path: str) -> None:
        """Take a shared lock on the slot, and set ``seal``, ``index``, ``scalars`` and ``slots``.

        Raise the errors of the class.
        """
        view = self.view
        try:
            fcntl.flock(view.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Torn(f"{path} is being written") from None
        if view.sequence % 2 or not view.sequence:
            raise Torn(f"{path} holds no complete copy")
        if not view.checksum:
            raise Damaged(f"the seal of {path} was changed")
        self.seal = Seal(view.step, view.generation, view.size_bytes, view.checksum)
        if os.fstat(view.fd).st_size < DATA_OFFSET + view.size_bytes:
            raise Damaged(f"{path} is shorter than its header states")
        self.index, self.scalars = view.index_bytes(), view.scalars_bytes()
        try:
            self.slots: list[Slot] = decode_index(self.index, view.size_bytes)
        except ChaoskitError as error:
            raise Damaged(f"the index of {path} was changed: {error}") from None

    def __enter__(self) -> StoredCopy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the slot, which may then be overwritten."""
        with suppress(OSError):
            fcntl.flock(self.view.fd, fcntl.LOCK_UN)
        self.view.close()

    def data(self) -> memoryview:
        """Return all data of the copy in place, not verified.

        Release it before this object is closed.
        """
        return self.view.bytes[DATA_OFFSET : DATA_OFFSET + self.seal.size_bytes]

    def verify(self) -> None:
        """Read all data once. Raise Damaged if it does not match the seal."""
        scratch = memoryview(bytearray(_BATCH_BYTES))
        digest = Checksum(self.seal.step, self.index, self.scalars)
        for start in range(0, self.seal.size_bytes, _BATCH_BYTES):
            part = scratch[: self.seal.size_bytes - start]
            self.read_bytes(part, start)
            digest.update(part)
        compare(self.seal, digest)

    def read_verified(self, target: memoryview) -> None:
        """Fill ``target``, which must have the size of the data, with all data.

        Raise Damaged if the data does not match the seal; ``target`` holds garbage then.
        """
        digest = Checksum(self.seal.step, self.index, self.scalars)
        for start in range(0, self.seal.size_bytes, _BATCH_BYTES):
            part = target[start : start + _BATCH_BYTES]
            self.read_bytes(part, start)
            digest.update(part)
        compare(self.seal, digest)

    def read_into(self, tensors: Sequence[HeldTensor]) -> bytes:
        """Fill ``tensors`` from the copy, verify the data, and return the scalars.

        Tensors that are cut like those of the copy are read at the speed of memory, others box by
        box.

        Raises:
            Damaged: if the data does not match the seal. The tensors hold garbage then.
            ChaoskitError: if part of a tensor is not in the copy, or has another type or shape.
                Some tensors may be filled then.
            BadInput: if a tensor cannot be filled byte by byte; see :func:`lay_out`.
        """
        slots, _ = lay_out(tensors)
        if slots != self.slots:
            assemble(tensors, [self])
            return self.scalars
        _fill_all(tensors, slots, self.seal, self.index, self.scalars, self._read)
        return self.scalars

    def read_bytes(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the data from ``offset`` on, not verified.

        Raise Damaged if the copy ends before. ``offset`` is in bytes of the data.
        """
        self._read([target], offset)

    def _read(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill the pieces, one after the other, with the data from ``offset`` on.

        Raise Damaged if the copy ends before.
        """
        total = sum(map(len, pieces))
        count = os.preadv(self.view.fd, pieces, DATA_OFFSET + offset)
        while count < total:  # short reads are rare: go on piece by piece
            rest, skip = [], count
            for piece in pieces:
                rest.append(piece[min(skip, len(piece)) :])
                skip -= min(skip, len(piece))
            added = os.preadv(self.view.fd, rest, DATA_OFFSET + offset + count)
            if not added:
                raise Damaged("the copy is shorter than its seal states")
            count += added

    def tensor(self, slot: Slot) -> Tensor:
        """Return the tensor at ``slot`` in memory of its own, not verified."""
        tensor = torch.empty(slot.shape, dtype=dtype_named(slot.dtype))
        if slot.size_bytes:
            self.read_bytes(_tensor_bytes(tensor), slot.offset)
        return tensor


def newest(
    paths: Iterable[str],
    after: tuple[int, int] = (-1, -1),
    is_current: Callable[[Seal], bool] = lambda seal: True,
) -> str:
    """Return the path of the newest complete copy after ``after``; "" if there is none.

    Args:
        paths: paths of slots, which are read without a lock. Slots that are gone are skipped.
        after: recency that a copy must exceed: generation and step.
        is_current: returns False for a copy to ignore.
    """
    best, best_recency = "", after
    for path in paths:
        with suppress(OSError):
            view = ArenaView.open(path)
            seal = Seal(view.step, view.generation, view.size_bytes, view.checksum)
            if seal.checksum and seal.recency > best_recency and is_current(seal):
                best, best_recency = path, seal.recency
            view.close()
    return best


def assemble(tensors: Sequence[HeldTensor], copies: Sequence[StoredCopy]) -> None:
    """Fill ``tensors`` from the copies of several pieces of one state, whatever way each is cut.

    Raises:
        Damaged: if a copy does not match its seal; no tensor is filled then.
        ChaoskitError: if the copies are not of one step and generation, leave a hole, or hold
            another type or shape. Some tensors may be filled then.
    """
    if len({copy.seal.recency for copy in copies}) > 1:
        raise ChaoskitError(
            f"the copies are of different steps: {sorted({copy.seal.step for copy in copies})}"
        )
    for copy in copies:
        copy.verify()
    offers: dict[str, list[tuple[StoredCopy, Slot]]] = {}
    for copy in copies:
        for slot in copy.slots:
            offers.setdefault(slot.path, []).append((copy, slot))
    for held in tensors:
        _fill_boxes(held, offers.get(held.path, []))


def _fill_all(
    tensors: Sequence[HeldTensor],
    slots: Sequence[Slot],
    seal: Seal,
    index: bytes,
    scalars: bytes,
    read: Callable[[Sequence[memoryview], int], None],
) -> None:
    """Fill ``tensors``, which are laid out like ``slots``, without an intermediate copy.

    Args:
        read: fills pieces of memory with the data from a place on. Called by two threads, in any
            order.

    Raises:
        Damaged: if the data does not match the seal. The tensors hold garbage then.
    """
    digest = Checksum(seal.step, index, scalars)
    buffers = [_buffer_for(held.tensor) for held in tensors]
    batches = list(_batches(slots, seal.size_bytes))
    memories: list[memoryview | None] = [None] * len(buffers)  # filled when first used
    views: list[list[memoryview]] = [[] for _ in batches]

    def memory(part: _Part) -> memoryview:
        if part.tensor_index is None:
            return memoryview(bytearray(part.end))
        whole = memories[part.tensor_index]
        if whole is None:
            whole = memories[part.tensor_index] = _tensor_bytes(buffers[part.tensor_index])
        return whole[part.start : part.end]

    def make(number: int) -> None:
        views[number] = [memory(part) for part in batches[number].parts]
        read(views[number], batches[number].offset)

    def consume(number: int) -> None:
        for piece in views[number]:
            digest.update(piece)

    pipeline = Pipeline(len(batches), make, consume)
    if len(batches) > 1:
        threading.Thread(target=pipeline.help, name="restore", daemon=True).start()
    pipeline.run()
    pipeline.finish()
    compare(seal, digest)
    for held, buffer in zip(tensors, buffers, strict=True):
        if buffer is not held.tensor:
            with torch.no_grad():
                held.tensor.copy_(buffer)


def compare(seal: Seal, digest: Checksum) -> None:
    """Raise Damaged if the digest of the data differs from the seal."""
    if (checksum := digest.hexdigest()) != seal.checksum:
        raise Damaged(
            f"the copy of step {seal.step} has checksum {checksum}, sealed as {seal.checksum}"
        )


def _fill_boxes(held: HeldTensor, offers: Sequence[tuple[StoredCopy, Slot]]) -> None:
    """Fill one tensor, box by box, from the copies that hold parts of it.

    Raise ChaoskitError if they leave a hole, or hold another type or shape.
    """
    dtype, whole_shape = (
        str(held.tensor.dtype).removeprefix("torch."),
        tuple(held.whole or held.tensor.shape),
    )
    for _, slot in offers:
        if slot.dtype != dtype or tuple(slot.whole or slot.shape) != whole_shape:
            stored_as = f"{slot.dtype} of shape {slot.whole or slot.shape}"
            raise ChaoskitError(
                f"{held.path} is stored as {stored_as}, but requested as {dtype} of shape {whole_shape}"
            )
    if not held.tensor.numel():
        return
    try:
        parts = cover(held.box, [slot.box for _, slot in offers])
    except ChaoskitError as error:
        raise ChaoskitError(f"{held.path}: {error}") from None
    for number, part in parts:
        copy, slot = offers[number]
        with torch.no_grad():
            held.tensor[part.within(held.box)] = copy.tensor(slot)[part.within(slot.box)].to(
                held.tensor.device
            )


def _tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _buffer_for(tensor: Tensor) -> Tensor:
    """Return the memory to read into: ``tensor`` itself if it is contiguous on the CPU.

    Otherwise return a new CPU tensor, to be copied to ``tensor`` afterwards.
    """
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class _Part(NamedTuple):
    """A range of bytes of a tensor, or of the gap behind one (``tensor_index`` is None)."""

    tensor_index: int | None
    start: int
    end: int


class _Batch(NamedTuple):
    """A unit of reading: parts that follow one another in the data from ``offset`` on."""

    offset: int
    parts: list[_Part]


def _batches(slots: Sequence[Slot], size_bytes: int) -> Iterator[_Batch]:
    """Yield batches that cover the data of a copy, gaps included."""
    batch, batch_bytes = _Batch(0, []), 0
    ends = [slot.offset for slot in slots[1:]] + [size_bytes]
    for tensor_index, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        tensor_bytes = slot.size_bytes
        parts = [
            _Part(tensor_index, start, min(start + _BATCH_BYTES, tensor_bytes))
            for start in range(0, tensor_bytes, _BATCH_BYTES)
        ]
        if gap_bytes := end - slot.offset - tensor_bytes:
            parts.append(_Part(None, 0, gap_bytes))
        for part in parts:
            length = part.end - part.start
            if batch.parts and (
                batch_bytes + length > _BATCH_BYTES or len(batch.parts) == _BATCH_PIECES
            ):
                yield batch
                batch, batch_bytes = _Batch(batch.offset + batch_bytes, []), 0
            batch.parts.append(part)
            batch_bytes += length
    if batch.parts:
        yield batch
