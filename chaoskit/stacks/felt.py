"""How a training felt a fault, as its log shows it: it went back, or stood still, and then came to a new step.

A step that was in flight when the fault struck may be shown right after it, and ranks that nobody has told yet may go
on for a while: none of these is a recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from chaoskit.stacks.course import Course

#: A pause of so many usual steps is one.
PAUSE_STEPS = 3.0


@dataclass(frozen=True, slots=True)
class Felt:
    """The first thing in the log that a fault can have caused.

    Attributes:
        step: the last new one before it.
        back: the lowest step that was shown again; None if the log did not go back.
        pause_s: how long no new step was shown.
        end: when a step was shown that was higher than all before, and which; None if there was none.
    """

    step: int
    back: int | None
    pause_s: float
    end: tuple[int, int] | None


def usual_step_s(course: Course, before_ns: float) -> float:
    """Median time between two new steps before the fault, or in the whole run where there are too few; 0 for none."""
    times = [at_ns for at_ns, _ in course.records]
    earlier = [at_ns for at_ns in times if at_ns <= before_ns]
    pauses = [
        (after - before) / 1e9 for before, after in pairwise(earlier if len(earlier) > 2 else times)
    ]
    return median(pauses) if pauses else 0.0


def look(course: Course, done_ns: int, until_ns: float) -> Felt | None:
    """How the training felt what was in force from ``done_ns`` on, when nothing else was done until ``until_ns``.

    A log that goes back does so for a reason, whenever that is. A pause is the fault's if it begins soon after it.
    """
    step_s = usual_step_s(course, done_ns)
    records = [record for record in course.records if done_ns < record[0]]
    before = (done_ns, course.highest_before(done_ns))
    for record in records:
        if before[0] > until_ns:
            return None
        back = course.went_back(before[0], record[0])
        pause_s = (record[0] - before[0]) / 1e9
        soon = (before[0] - done_ns) / 1e9 <= PAUSE_STEPS * step_s
        if back is not None or (step_s > 0 and soon and pause_s > PAUSE_STEPS * step_s):
            return Felt(before[1], back, pause_s, record)
        before = record
    back = course.went_back(before[0], float("inf"))
    return Felt(before[1], back, 0.0, None) if back is not None else None
