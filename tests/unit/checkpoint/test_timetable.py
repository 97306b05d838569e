"""Times at which the state is stored: by steps, by time, or both; and all nodes agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaoskit.checkpoint.disk.due_steps import NOTICE_STEPS, DueSteps
from chaoskit.coordinator.schedules.save_schedule import Timetable, halting_step


def run(
    every_s: float, step_s: float, until_s: float, *, timetable: Timetable | None = None
) -> list[tuple[int, int]]:
    """Return the picked steps while one is committed every ``step_s``, each with the newest step at
    that moment.
    """
    timetable = timetable or Timetable(every_s)
    picked, step = [], 0
    for tick in range(int(until_s / 0.02)):
        now_s = tick * 0.02
        while (step + 1) * step_s <= now_s:
            step += 1
            timetable.note_step(step, 1, now_s)
        if (due_step := timetable.due(now_s)) is not None:
            picked.append((due_step, step))
    return picked


@given(every_s=st.floats(0.5, 20.0), step_s=st.floats(0.005, 3.0))
def test_as_many_as_time_allows_each_told_in_advance(every_s: float, step_s: float) -> None:
    picked = run(every_s, step_s, 60.0)
    steps = [step for step, _ in picked]
    assert steps == sorted(set(steps)) or step_s * NOTICE_STEPS > every_s
    assert len(picked) <= 60.0 / every_s
    assert len(picked) >= 60.0 / (every_s + 2 * step_s + 0.1) - 2
    for step, newest in picked:
        assert (step - newest) * step_s >= NOTICE_STEPS * step_s
        assert (step - newest) * step_s <= (NOTICE_STEPS + 1) * step_s + 1.0


def test_never_by_time() -> None:
    assert run(0.0, 0.1, 10.0) == []


def test_what_a_membership_did_not_reach_is_picked_anew() -> None:
    timetable = Timetable(5.0)
    (first,) = run(5.0, 0.5, 5.6, timetable=timetable)
    timetable.note_step(
        first[1], 2, 5.7
    )  # the picked step is still to come, and a node is another one now
    assert timetable.due(5.8) is None  # until the length of a step is known
    timetable.note_step(first[1] + 1, 2, 6.2)
    assert timetable.due(6.2) is not None
    assert timetable.due(6.3) is None


def test_what_a_membership_did_reach_is_not() -> None:
    timetable = Timetable(5.0)
    (first,) = run(5.0, 0.5, 5.6, timetable=timetable)
    timetable.note_step(first[0], 1, 7.0)
    timetable.note_step(first[0], 2, 7.1)
    timetable.note_step(first[0] + 1, 2, 7.6)
    assert timetable.due(7.6) is None


def test_who_still_speaks_of_an_older_membership_is_not_heard() -> None:
    timetable = Timetable(1.0)
    timetable.note_step(10, 2, 0.0)
    timetable.note_step(90, 1, 0.5)
    timetable.note_step(11, 2, 1.5)
    step = timetable.due(1.5)
    assert step is not None
    assert step < 20


@given(
    every_steps=st.integers(0, 7),
    ordered=st.lists(st.integers(1, 40), max_size=4),
    step=st.integers(0, 30),
    by=st.booleans(),
)
def test_nothing_is_due_in_between(
    every_steps: int, ordered: list[int], step: int, by: bool
) -> None:
    due = DueSteps(every_steps, by_time=by or not every_steps)
    for number in ordered:
        due.order(number)
    later = due.earliest_after(step)
    assert later > step
    assert not any(due.is_due(between) for between in range(step + 1, later))
    if by:
        assert later <= step + NOTICE_STEPS  # a later order is for no earlier step


@pytest.mark.parametrize(("every_steps", "found"), [(0, [7]), (5, [5, 7, 10])])
def test_both(every_steps: int, found: list[int]) -> None:
    due = DueSteps(every_steps, by_time=True)
    due.order(7)
    assert [step for step in range(12) if due.is_due(step)] == found


@pytest.mark.parametrize(
    ("step_s", "step"),
    [(0.0, 41), (20.0, 41), (0.5, 41), (0.35, 42), (0.1, 44), (0.01, 76)],
)
def test_ranks_end_after_the_step_that_they_are_in_or_one_that_the_order_reaches(
    step_s: float, step: int
) -> None:
    """A long step is the last one; of short steps there are as many as pass before all ranks have
    the order.
    """
    assert halting_step(40, step_s, heard_s=0.1) == step
