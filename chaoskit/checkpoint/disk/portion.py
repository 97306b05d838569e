"""What one node stores of a state: boxes of it, copied out of memory that training will write to again."""

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


class Cut(NamedTuple):
    """A part of what lies in a slot: some of the rows of its tensor."""

    slot: Slot
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.size * dtype_named(self.slot.dtype).itemsize

    @property
    def offset(self) -> int:
        """Of the first byte, in the data of the state."""
        if not self.box.extent or not self.box.size:
            return self.slot.offset
        row_bytes = self.size_bytes // self.box.extent[0]
        return self.slot.offset + (self.box.start[0] - self.slot.box.start[0]) * row_bytes


def share(slots: Sequence[Slot], number: int, count: int) -> list[Cut]:
    """Share ``number`` of ``count`` of a state that every node holds: cut between rows, so that bytes are balanced.

    All shares together are the state, each element once.
    """
    total = sum(slot.size_bytes for slot in slots)
    first, last = total * number // count, total * (number + 1) // count
    cuts, place = [], 0
    for slot in slots:
        if slot.size_bytes:
            rows = slot.shape[0] if slot.shape else 1
            row_bytes = slot.size_bytes // rows
            begin, end = (
                min(max(-(-(edge - place) // row_bytes), 0), rows) for edge in (first, last)
            )
            if begin < end:
                cuts.append(Cut(slot, _rows(slot.box, begin, end)))
        elif not number:
            cuts.append(Cut(slot, slot.box))
        place += slot.size_bytes
    return cuts


def _rows(box: Box, begin: int, end: int) -> Box:
    if not box.extent:
        return box
    return Box((box.start[0] + begin, *box.start[1:]), (end - begin, *box.extent[1:]))


@dataclass(frozen=True, slots=True)
class Portion:
    """A node's, or a piece's, part of a snapshot.

    Args:
        number, count: which part it is, of how many.
        world: ranks that trained.
        leads: whether this node commits the snapshot when all parts are written.
        boxes: what is stored, with its bytes.
        scalars: the numbers of the state.
        last: whether nothing is trained after it.
    """

    step: int
    generation: int
    number: int
    count: int
    world: int
    leads: bool
    boxes: tuple[tuple[Cut, memoryview], ...]
    scalars: bytes
    last: bool = False

    @property
    def age(self) -> tuple[int, int]:
        return self.step, self.generation

    def poisoned(self) -> str:
        """The first tensor that is not finite; "" if all are."""
        for cut, data in self.boxes:
            dtype = dtype_named(cut.slot.dtype)
            if data and not is_finite(torch.frombuffer(data, dtype=dtype)):
                return cut.slot.path
        return ""


def fresh_memory(size_bytes: int) -> memoryview:
    """Memory whose pages come as it is filled: to clear it first would keep the interpreter's lock for long."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]


def copy_shared(
    view: ArenaView, slots: Sequence[Slot], number: int, count: int
) -> list[tuple[Cut, memoryview]]:
    """This node's share of the state in the arena of a worker, whose next update should wait meanwhile.

    Raises:
        Torn: if the worker did not wait.
    """
    sequence, boxes = view.sequence, []
    for cut in share(slots, number, count):
        data, done = fresh_memory(cut.size_bytes), 0
        while done < len(data):
            done += view.read_into(data[done : done + CHUNK_BYTES], cut.offset + done)
            if (
                view.sequence != sequence
            ):  # now and not at the end: the writer may be waiting for this to be over
                raise Torn("the state was left before its copy was complete")
        boxes.append((cut, data))
    if sequence % 2 or view.sequence != sequence:
        raise Torn("the state was left before its copy was complete")
    return boxes


def copy_piece(path: str, age: tuple[int, int]) -> tuple[list[tuple[Cut, memoryview]], bytes]:
    """A sealed piece in a slot, and its scalars. Its writer finds the slot taken only until this returns.

    Raises:
        Torn: if it is not, or no more, of that age. Damaged: if it is not what was sealed. OSError: if it is gone.
    """
    with StoredCopy(path) as copy:
        if (copy.seal.step, copy.seal.generation) != age:
            raise Torn(f"step {age[0]} was overwritten by step {copy.seal.step}")
        data = fresh_memory(copy.seal.size_bytes)
        copy.read_verified(data)
        slots, scalars = copy.slots, copy.scalars
    cuts = [Cut(slot, slot.box) for slot in slots if slot.size_bytes or not slot.whole]
    return [(cut, data[cut.offset : cut.offset + cut.size_bytes]) for cut in cuts], scalars
