"""The rule by which slots rotate: which one is written next, and whose content counts. Without memory and locks.

:class:`chaoskit.checkpoint.memory.slots.Slots` applies it to shared memory, and the simulated nodes of the tests to
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """What a slot holds; zeros where it holds nothing.

    Attributes:
        step, generation: as in a seal.
        complete: it is sealed, and can be restored from.
        taken: it is being written.
    """

    step: int = 0
    generation: int = 0
    complete: bool = False
    taken: bool = False

    @property
    def recency(self) -> tuple[int, int]:
        """Sort key: the larger, the newer the content."""
        return self.generation, self.step


def protected_slot(slots: Sequence[Content], protected_step: int) -> int | None:
    """The slot that is not overwritten: with the protected step, or with the newest where no slot has that."""
    usable = [index for index, slot in enumerate(slots) if slot.complete and not slot.taken]
    protected = [index for index in usable if slots[index].step == protected_step]
    return max(protected or usable, key=lambda index: slots[index].recency, default=None)


def write_order(slots: Sequence[Content], protected_step: int) -> list[int]:
    """The slots that may be overwritten, the one that is needed least first: what is not complete, then the oldest."""
    keep = protected_slot(slots, protected_step)
    free = [index for index, slot in enumerate(slots) if index != keep and not slot.taken]
    return sorted(free, key=lambda index: (slots[index].complete, slots[index].recency))


def undone(slots: Sequence[Content], step: int) -> list[int]:
    """The slots that count no more where training goes back to ``step``: what was committed later never happened."""
    return [index for index, slot in enumerate(slots) if slot.step > step and not slot.taken]
