"""Effect of a fault on a training, as its log shows it: steps shown again, or a pause.

A step that was in flight when the fault struck may be shown right after it. Ranks that do not know
of the fault yet may go on for a while. Neither is a recovery.

-> ``stacks/course.py``: the steps. ``experiment/judge/command_judge.py``: how a fault is matched
with its effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from chaoskit.stacks.course import Course

#: A time without a new step counts as a pause from so many usual steps on.
PAUSE_STEPS = 3.0


@dataclass(frozen=True, slots=True)
class Felt:
    """The effect in the log that a fault can have caused.

    Attributes:
        step: the last new step before it; -1 if there was none.
        back: the lowest step that was shown again; None if the log did not go back.
        pause_s: the time in seconds without a new step; 0 if none followed.
        end: (time in ns, step) of the next step that was higher than all before; None if there was
            none.
    """

    step: int
    back: int | None
    pause_s: float
    end: tuple[int, int] | None


def usual_step_s(course: Course, before_ns: float) -> float:
    """Return the median time between two new steps before the fault, in seconds.

    With too few steps before the fault, it is the median over the whole run; 0 if there is none.
    """
    times = [at_ns for at_ns, _ in course.records]
    earlier = [at_ns for at_ns in times if at_ns <= before_ns]
    pauses = [
        (after - before) / 1e9 for before, after in pairwise(earlier if len(earlier) > 2 else times)
    ]
    return median(pauses) if pauses else 0.0


def look(course: Course, done_ns: int, until_ns: float, settle_s: float = 0.0) -> Felt | None:
    """Return the effect of a fault in force from ``done_ns`` on, before another at ``until_ns``.

    A log that goes back is an effect at any time. A pause is an effect if it begins soon after the
    fault. Of several, the one with the longest pause counts: a busy machine makes short ones, too.
    Return None if the log shows no effect.

    Args:
        done_ns: time at which the fault was in force.
        until_ns: time of the next fault; infinity for none.
        settle_s: seconds for which a struck process may still live.
    """
    step_s = usual_step_s(course, done_ns)
    soon_s = settle_s + PAUSE_STEPS * step_s
    before = (done_ns, course.highest_before(done_ns))
    longest: Felt | None = None
    for record in [record for record in course.records if done_ns < record[0]]:
        if before[0] > until_ns:
            return longest
        back = course.went_back(before[0], record[0])
        pause_s = (record[0] - before[0]) / 1e9
        is_soon = (before[0] - done_ns) / 1e9 <= soon_s
        is_pause = step_s > 0 and is_soon and pause_s > PAUSE_STEPS * step_s
        if (back is not None or is_pause) and (longest is None or pause_s > longest.pause_s):
            longest = Felt(before[1], back, pause_s, record)
        before = record
    back = course.went_back(before[0], float("inf"))
    return Felt(before[1], back, 0.0, None) if back is not None else longest
