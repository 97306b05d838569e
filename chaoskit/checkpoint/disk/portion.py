"""The portion of a state that a node stores, copied out of memory that training will overwrite.

-> ``daemon/replica_keeper.py`` and ``daemon/piece_keeper.py``: when a portion is copied.
-> ``daemon/saving.py``: writes the portions of all nodes into one snapshot.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from chaoskit.checkpoint.layout.arena import ArenaView, Slot, dtype_named
from chaoskit.checkpoint.layout.boxes import Box
from chaoskit.checkpoint.layout.finite import is_finite
from chaoskit.checkpoint.layout.seal import CHUNK_BYTES, Torn
from chaoskit.checkpoint.memory.stored import StoredCopy


class PortionCut(NamedTuple):
    """A part of a tensor in a slot: some of its rows."""

    slot: Slot
    box: Box

    @property
    def size_bytes(self) -> int:
        """The size of the part."""
        return self.box.size * dtype_named(self.slot.dtype).itemsize

    @property
    def offset(self) -> int:
        """The offset of the first byte in the data of the state."""
        if not self.box.extent or not self.box.size:
            return self.slot.offset
        row_bytes = self.size_bytes // self.box.extent[0]
        return self.slot.offset + (self.box.start[0] - self.slot.box.start[0]) * row_bytes


def cuts_of_share(slots: Sequence[Slot], number: int, count: int) -> list[PortionCut]:
    """Return the cuts of share ``number`` of ``count`` of a state that every node holds.

    A state is cut between rows so that shares have about equal sizes. All shares together hold each
    element once.

    Args:
        slots: all slots of the state, in their order.
        number: number of the share, from 0 on.
        count: number of shares.
    """
    total = sum(slot.size_bytes for slot in slots)
    first, last = total * number // count, total * (number + 1) // count
    cuts, position = [], 0
    for slot in slots:
        if slot.size_bytes:
            rows = slot.shape[0] if slot.shape else 1
            row_bytes = slot.size_bytes // rows
            begin, end = (
                min(max(-(-(edge - position) // row_bytes), 0), rows) for edge in (first, last)
            )
            if begin < end:
                cuts.append(PortionCut(slot, _rows(slot.box, begin, end)))
        elif not number:
            cuts.append(PortionCut(slot, slot.box))
        position += slot.size_bytes
    return cuts


def _rows(box: Box, begin: int, end: int) -> Box:
    """Return the rows ``begin`` to ``end`` of a box."""
    if not box.extent:
        return box
    return Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.extent[1:]))


@dataclass(frozen=True, slots=True)
class Portion:
    """The part of a snapshot that a node stores, or that is stored of one piece.

    Args:
        step: step of the state.
        generation: generation that committed it; at a job's end, the newest generation.
        index: index of this part, from 0 on.
        part_count: number of parts.
        world_size: number of ranks that trained.
        leads: True if this node commits the snapshot when all parts are written.
        boxes: the boxes to store, with their bytes.
        scalars: the encoded numbers of the state, such as learning rates.
        is_last: True if no training follows.
    """

    step: int
    generation: int
    index: int
    part_count: int
    world_size: int
    leads: bool
    boxes: tuple[tuple[PortionCut, memoryview], ...]
    scalars: bytes
    is_last: bool = False

    @property
    def age(self) -> tuple[int, int]:
        """Step and generation of the state."""
        return self.step, self.generation

    def poisoned_path(self) -> str:
        """Return the path of the first tensor that is not finite; "" if all are finite."""
        for cut, data in self.boxes:
            dtype = dtype_named(cut.slot.dtype)
            if data and not is_finite(torch.frombuffer(data, dtype=dtype)):
                return cut.slot.path
        return ""


def fresh_memory(size_bytes: int) -> memoryview:
    """Return new memory whose pages are mapped when they are filled.

    Clearing the memory first would hold the interpreter's lock for long.
    """
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]


def copy_shared(
    view: ArenaView, slots: Sequence[Slot], number: int, count: int
) -> list[tuple[PortionCut, memoryview]]:
    """Copy share ``number`` of ``count`` of the state in a worker's arena ``view``.

    Return its cuts, each with a copy of its bytes. Unlike a piece, they are not verified.

    Raises:
        Torn: if the worker was in an update, or began its next one meanwhile.
        OSError: if the arena is shorter than its data.
    """
    sequence, boxes = view.sequence, []
    for cut in cuts_of_share(slots, number, count):
        data, done = fresh_memory(cut.size_bytes), 0
        while done < len(data):
            done += view.read_into(data[done : done + CHUNK_BYTES], cut.offset + done)
            # checked for each chunk: the writer may wait for the end of this copy
            if view.sequence != sequence:
                raise Torn("the state was changed before its copy was complete")
        boxes.append((cut, data))
    if sequence % 2 or view.sequence != sequence:
        raise Torn("the state was changed before its copy was complete")
    return boxes


def copy_piece(
    path: str, age: tuple[int, int]
) -> tuple[list[tuple[PortionCut, memoryview]], bytes]:
    """Copy the sealed piece in a slot, which is locked meanwhile.

    Return its cuts, each with a copy of its bytes, and its scalars.

    Raises:
        Torn: if the slot is being written or holds no complete copy, or its piece is not of step
            and generation ``age``.
        Damaged: if the data does not match the seal.
        OSError: if the slot is gone.
    """
    with StoredCopy(path) as copy:
        if (copy.seal.step, copy.seal.generation) != age:
            raise Torn(f"step {age[0]} was overwritten by step {copy.seal.step}")
        data = fresh_memory(copy.seal.size_bytes)
        copy.read_verified(data)
        slots, scalars = copy.slots, copy.scalars
    cuts = [PortionCut(slot, slot.box) for slot in slots if slot.size_bytes or not slot.whole]
    return [(cut, data[cut.offset : cut.offset + cut.size_bytes]) for cut in cuts], scalars
