"""The rule of slots: copies that may be overwritten, and copies that never are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.memory.rotation import Content, protected_slot, undone, write_order

contents = st.builds(Content, st.integers(0, 5), st.integers(0, 3), st.booleans(), st.booleans())
slots_of_any_kind = st.lists(contents, max_size=4)


def sealed(step: int, generation: int = 1) -> Content:
    return Content(step, generation, complete=True)


def test_empty_slots_are_written_first() -> None:
    """An empty slot is written before the copy of any step, and an incomplete copy before a
    complete one.
    """
    assert write_order([sealed(3), Content()], -1) == [1]
    assert write_order([Content(9, 9), sealed(3), Content()], -1) == [2, 0]


def test_the_newest_is_kept_where_none_is_protected() -> None:
    """The newest complete copy is kept if no step is protected, or no slot holds the protected
    step.
    """
    assert protected_slot([sealed(3), sealed(4)], -1) == 1
    assert protected_slot([sealed(3), sealed(4)], 2) == 1
    assert write_order([sealed(3), sealed(4)], -1) == [0]


def test_the_protected_step_is_kept_and_a_newer_copy_is_overwritten() -> None:
    """The slot with the protected step is kept at any age."""
    assert protected_slot([sealed(3), sealed(7)], 3) == 0
    assert write_order([sealed(3), sealed(7)], 3) == [1]


def test_of_two_copies_the_one_of_the_later_generation_is_newer() -> None:
    """A later generation may go back to an older step: its steps are newer than those before."""
    assert protected_slot([sealed(7, 1), sealed(5, 2)], -1) == 1
    assert protected_slot([sealed(7, 1), sealed(7, 2)], 7) == 1


def test_with_one_copy_written_and_one_kept_there_is_no_slot() -> None:
    """While one slot is written and the other is needed, no slot is overwritten."""
    assert write_order([sealed(3), Content(4, 1, taken=True)], -1) == []


def test_what_was_committed_later_never_happened() -> None:
    """Copies of later steps do not count if training goes back; a slot being written is left to its
    writer.
    """
    assert undone([sealed(3), sealed(4), Content(5, 1, taken=True), Content()], 3) == [1]


@given(slots_of_any_kind, st.integers(-1, 5))
def test_a_slot_is_kept_or_written_or_may_be_overwritten(
    slots: list[Content], protected: int
) -> None:
    """Each slot is kept, being written, or free; and the kept slot is the best there is."""
    keep, free = protected_slot(slots, protected), write_order(slots, protected)
    taken = [index for index, slot in enumerate(slots) if slot.taken]
    assert sorted([*free, *taken, *([] if keep is None else [keep])]) == list(range(len(slots)))
    usable = [slot for slot in slots if slot.complete and not slot.taken]
    assert (keep is None) == (not usable)
    if keep is not None:
        best = [slot for slot in usable if slot.step == protected] or usable
        assert slots[keep].recency == max(slot.recency for slot in best)
    complete = [slots[index].complete for index in free]
    assert complete == sorted(complete), (
        "a complete copy is overwritten only where all are complete"
    )


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_two_slots_always_hold_the_last_protected_copy(happenings: list[tuple[bool, bool]]) -> None:
    """The protected step, once complete, stays until another is named, whatever copies are made and
    broken off.
    """
    slots, protected = [Content(), Content()], -1
    for step, (completes, protects) in enumerate(happenings, start=1):
        index = write_order(slots, protected)[0]
        slots[index] = Content(step, 1, complete=completes)
        if completes and protects:
            protected = step
        complete = [slot.step for slot in slots if slot.complete]
        assert protected == -1 or protected in complete
        assert complete or not any(done for done, _ in happenings[:step])
