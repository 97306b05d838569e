"""Schedule of the steps after which the state of a job is stored, where they are picked by time.

A step is picked in advance, so that each node can store its part of the same state.

-> checkpoint/disk/due_steps.py: steps that are picked by their number; daemon/saving.py stores the
state of a step. coordinator/handlers/on_end.py orders the nodes to do so.
"""

from __future__ import annotations

import math

from chaoskit.checkpoint.disk.due_steps import NOTICE_STEPS

#: Time between the pick of a step and the step itself: an order takes time to arrive, and the
#: newest step that is known is out of date.
NOTICE_S = 0.25


class Timetable:
    """Timetable that picks a step every ``every_s`` seconds: a pure state machine.

    Args:
        every_s: time between two picks, in seconds; 0 for never.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last_s: float | None = None  # when a step was picked, or the first one was seen
        self._picked_step = self._generation = -1
        # the first and the newest step since the last pick, and when each was seen
        self._first = self._newest = (-1, 0.0)

    def note_step(self, step: int, generation: int, now_s: float) -> None:
        """Note that a rank has committed ``step`` steps; ignore it for an older generation."""
        if not self._every_s or generation < self._generation:
            return
        if self._last_s is None:
            self._last_s = now_s
        if generation > self._generation:
            # a step that the generation before was to store and has not reached is picked anew
            if self._newest[0] < self._picked_step:
                self._last_s = now_s - self._every_s
            self._picked_step, self._generation = -1, generation
            self._first = self._newest = (step, now_s)
        elif step > self._newest[0]:
            self._newest = (step, now_s)

    def due(self, now_s: float) -> int | None:
        """Pick the step after which to store the state, and return it once; None if none is due.

        No step is due before the time of a step is known. A step that its generation does not reach
        is followed by another one in the next generation.
        """
        if self._last_s is None or now_s < self._last_s + self._every_s:
            return None
        steps, seconds = self._newest[0] - self._first[0], self._newest[1] - self._first[1]
        if not steps:
            return None  # the duration of a step is not known, or no step is committed
        notice_steps = math.ceil(NOTICE_S * steps / seconds) if seconds else 0
        self._picked_step = self._newest[0] + NOTICE_STEPS + notice_steps
        self._last_s, self._first = now_s, self._newest
        return self._picked_step


def halting_step(committed: int, step_s: float, heard_s: float) -> int:
    """Return the step after which all ranks are to end.

    It is the step that they are in, or the first one that no rank reaches before the order.

    Args:
        committed: the newest step that is known.
        step_s: how long a step takes, in seconds; 0 if that is not known.
        heard_s: how old ``committed`` may be, in seconds.
    """
    return committed + 1 + (int((NOTICE_S + heard_s) / step_s) if step_s else 0)
