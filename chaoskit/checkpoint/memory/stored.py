"""Reading back what slots hold: after the death of their writer, into any tensors, in any cut.

    with StoredCopy(path) as copy:
        scalars = copy.read_into(tensors)

A copy is complete or invisible. Its bytes are verified when they are read: one that is damaged raises, and what it was
read into must be read again from another copy.
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
    """A sealed copy in a slot, which is not overwritten while this is open.

    Args:
        path: where this process can open the slot, such as ``/proc/PID/fd/N``.

    Raises:
        Torn: if there is no complete copy in it. Damaged: if what describes the copy was changed. OSError: if there
            is no such slot.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.view = ArenaView.open(path)
        try:
            self._look(path)
        except BaseException:
            self.close()
            raise

    def _look(self, path: str) -> None:
        view = self.view
        try:
            fcntl.flock(view.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Torn(f"{path} is being written") from None
        if view.sequence % 2 or not view.sequence:
            raise Torn(f"{path} holds nothing complete")
        if not view.checksum:
            raise Damaged(f"the seal of {path} was changed")
        self.seal = Seal(view.step, view.generation, view.size_bytes, view.checksum)
        if os.fstat(view.fd).st_size < DATA_OFFSET + view.size_bytes:
            raise Damaged(f"{path} was cut off")
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
        """The slot may be overwritten again."""
        with suppress(OSError):
            fcntl.flock(self.view.fd, fcntl.LOCK_UN)
        self.view.close()

    def data(self) -> memoryview:
        """All of the data where it lies. Not verified; to be released before this is closed."""
        return self.view.bytes[DATA_OFFSET : DATA_OFFSET + self.seal.size_bytes]

    def verify(self) -> None:
        """Read all of it once. Raises Damaged if it is not what was sealed."""
        scratch = memoryview(bytearray(_BATCH_BYTES))
        digest = Checksum(self.seal.step, self.index, self.scalars)
        for start in range(0, self.seal.size_bytes, _BATCH_BYTES):
            part = scratch[: self.seal.size_bytes - start]
            self.read_bytes(part, start)
            digest.update(part)
        compare(self.seal, digest)

    def read_verified(self, target: memoryview) -> None:
        """Fill ``target`` with all of the data. Raises Damaged if it is not what was sealed."""
        digest = Checksum(self.seal.step, self.index, self.scalars)
        for start in range(0, self.seal.size_bytes, _BATCH_BYTES):
            part = target[start : start + _BATCH_BYTES]
            self.read_bytes(part, start)
            digest.update(part)
        compare(self.seal, digest)

    def read_into(self, tensors: Sequence[HeldTensor]) -> bytes:
        """Fill ``tensors`` with what is stored of them, and verify it; returns the scalars.

        Tensors that are cut in the same way as those of the copy are read at the speed of memory, others box by box.

        Raises:
            Damaged: if the copy is not what was sealed. The tensors are then of no use.
            ChaoskitError: if something of a tensor is not in the copy, or is of another type.
        """
        slots, _ = lay_out(tensors)
        if slots != self.slots:
            assemble(tensors, [self])
            return self.scalars
        _fill_all(tensors, slots, self.seal, self.index, self.scalars, self._read)
        return self.scalars

    def read_bytes(self, target: memoryview, place: int) -> None:
        """Fill ``target`` with the data from ``place`` on. Not verified."""
        self._read([target], place)

    def _read(self, pieces: Sequence[memoryview], place: int) -> None:
        wanted = sum(map(len, pieces))
        count = os.preadv(self.view.fd, pieces, DATA_OFFSET + place)
        while count < wanted:  # short reads are rare: go on piece by piece
            rest, skip = [], count
            for piece in pieces:
                rest.append(piece[min(skip, len(piece)) :])
                skip -= min(skip, len(piece))
            more = os.preadv(self.view.fd, rest, DATA_OFFSET + place + count)
            if not more:
                raise Damaged("the copy is shorter than its seal says")
            count += more

    def tensor(self, slot: Slot) -> Tensor:
        """What lies at ``slot``, in memory of its own. Not verified."""
        found = torch.empty(slot.shape, dtype=dtype_named(slot.dtype))
        if slot.size_bytes:
            self.read_bytes(_tensor_bytes(found), slot.offset)
        return found


def newest(
    paths: Iterable[str],
    after: tuple[int, int] = (-1, -1),
    counts: Callable[[Seal], bool] = lambda seal: True,
) -> str:
    """The slot with the newest complete copy that counts, if newer than ``after``; else "". Looks without a lock."""
    best, best_recency = "", after
    for path in paths:
        with suppress(OSError):
            view = ArenaView.open(path)
            seal = Seal(view.step, view.generation, view.size_bytes, view.checksum)
            if seal.checksum and seal.recency > best_recency and counts(seal):
                best, best_recency = path, seal.recency
            view.close()
    return best


def assemble(tensors: Sequence[HeldTensor], copies: Sequence[StoredCopy]) -> None:
    """Fill ``tensors`` from the copies of several pieces of one state, whatever way each is cut.

    Raises:
        Damaged: if a copy is not what was sealed; nothing is filled then.
        ChaoskitError: if the copies are not of one step, or leave a hole, or hold another type.
    """
    if len({copy.seal.recency for copy in copies}) > 1:
        raise ChaoskitError(
            f"copies of different steps: {sorted({copy.seal.step for copy in copies})}"
        )
    for copy in copies:
        copy.verify()
    offers: dict[str, list[tuple[StoredCopy, Slot]]] = {}
    for copy in copies:
        for slot in copy.slots:
            offers.setdefault(slot.path, []).append((copy, slot))
    for held in tensors:
        _fill(held, offers.get(held.path, []))


def _fill_all(
    tensors: Sequence[HeldTensor],
    slots: Sequence[Slot],
    seal: Seal,
    index: bytes,
    scalars: bytes,
    read: Callable[[Sequence[memoryview], int], None],
) -> None:
    """Fill ``tensors``, which are laid out as ``slots`` say, straight from where a copy is read.

    Args:
        read: fills pieces of memory with the data from some place on; called by two threads, in any order.

    Raises:
        Damaged: if it was not what was sealed. The tensors are then of no use.
    """
    digest = Checksum(seal.step, index, scalars)
    landings = [_landing(held.tensor) for held in tensors]
    batches = list(_batches(slots, seal.size_bytes))
    memories: list[memoryview | None] = [None] * len(landings)  # looked up while others are read
    views: list[list[memoryview]] = [[] for _ in batches]

    def memory(part: _Part) -> memoryview:
        if part.tensor is None:
            return memoryview(bytearray(part.end))
        whole = memories[part.tensor]
        if whole is None:
            whole = memories[part.tensor] = _tensor_bytes(landings[part.tensor])
        return whole[part.start : part.end]

    def make(number: int) -> None:
        views[number] = [memory(part) for part in batches[number].parts]
        read(views[number], batches[number].place)

    def consume(number: int) -> None:
        for piece in views[number]:
            digest.update(piece)

    pipeline = Pipeline(len(batches), make, consume)
    if len(batches) > 1:
        threading.Thread(target=pipeline.help, name="restore", daemon=True).start()
    pipeline.run()
    pipeline.finish()
    compare(seal, digest)
    for held, landing in zip(tensors, landings, strict=True):
        if landing is not held.tensor:
            with torch.no_grad():
                held.tensor.copy_(landing)


def compare(seal: Seal, digest: Checksum) -> None:
    """Raises Damaged if what was digested is not what was sealed."""
    if (found := digest.hexdigest()) != seal.checksum:
        raise Damaged(
            f"the copy of step {seal.step} has checksum {found}, sealed as {seal.checksum}"
        )


def _fill(held: HeldTensor, offers: Sequence[tuple[StoredCopy, Slot]]) -> None:
    dtype, whole = (
        str(held.tensor.dtype).removeprefix("torch."),
        tuple(held.whole or held.tensor.shape),
    )
    for _, slot in offers:
        if slot.dtype != dtype or tuple(slot.whole or slot.shape) != whole:
            stored_as = f"{slot.dtype} of shape {slot.whole or slot.shape}"
            raise ChaoskitError(
                f"{held.path} is stored as {stored_as}, wanted as {dtype} of shape {whole}"
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
    """The memory of a contiguous CPU tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _landing(tensor: Tensor) -> Tensor:
    """Where bytes for ``tensor`` can be read to: itself, if its memory is that of a plain block."""
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


class _Part(NamedTuple):
    """Bytes of a tensor, or of the gap behind one."""

    tensor: int | None
    start: int
    end: int


class _Batch(NamedTuple):
    """What is read at once: parts that lie one behind the other from ``place`` on."""

    place: int
    parts: list[_Part]


def _batches(slots: Sequence[Slot], size_bytes: int) -> Iterator[_Batch]:
    batch, filled = _Batch(0, []), 0
    ends = [slot.offset for slot in slots[1:]] + [size_bytes]
    for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
        size = slot.size_bytes
        parts = [
            _Part(number, at, min(at + _BATCH_BYTES, size)) for at in range(0, size, _BATCH_BYTES)
        ]
        if gap := end - slot.offset - size:
            parts.append(_Part(None, 0, gap))
        for part in parts:
            length = part.end - part.start
            if batch.parts and (
                filled + length > _BATCH_BYTES or len(batch.parts) == _BATCH_PIECES
            ):
                yield batch
                batch, filled = _Batch(batch.place + filled, []), 0
            batch.parts.append(part)
            filled += length
    if batch.parts:
        yield batch
