"""Rules of slot rotation as pure functions: the slot to write next, and the slots that count.

The simulated nodes of the tests apply them to numbers.

-> ``memory/slots.py``: applies them to shared memory.
-> ``runtime/state/copies.py``: which step is protected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Content(NamedTuple):
    """The content of a slot; all fields are zero if the slot is empty.

    Attributes:
        step: step of the copy, as in its seal.
        generation: generation of the copy, as in its seal.
        complete: the copy is sealed and can be restored.
        taken: a writer holds the slot.
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
    """Return the index of the slot that must not be overwritten, or None if there is none.

    Complete slots that no writer holds are compared. The result is the newest of them with the
    protected step, or the newest of all if none has that step.
    """
    usable = [index for index, slot in enumerate(slots) if slot.complete and not slot.taken]
    protected = [index for index in usable if slots[index].step == protected_step]
    return max(protected or usable, key=lambda index: slots[index].recency, default=None)


def write_order(slots: Sequence[Content], protected_step: int) -> list[int]:
    """Return the indices of the slots that may be overwritten: the incomplete, then the oldest.

    A slot that a writer holds is not among them.
    """
    protected_index = protected_slot(slots, protected_step)
    free = [
        index for index, slot in enumerate(slots) if index != protected_index and not slot.taken
    ]
    return sorted(free, key=lambda index: (slots[index].complete, slots[index].recency))


def undone(slots: Sequence[Content], step: int) -> list[int]:
    """Return the indices of the slots that become invalid when training goes back to ``step``.

    A slot that a writer holds is not among them.
    """
    return [index for index, slot in enumerate(slots) if slot.step > step and not slot.taken]
