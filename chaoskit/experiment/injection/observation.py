"""The end of the observation of a training that goes on after the run. Pure.

-> experiment/injection/command_follower.py asks it. A run of a command ends with its command.
"""

from __future__ import annotations

from collections import deque

#: New highest steps that must be shown after the observation: a step that was under way during the
#: fault may still be shown, and the log of a job that has recovered keeps showing steps.
NEW_STEPS = 3


class JobObservation:
    """The decision when a training has been observed for long enough after its faults.

    Args:
        observe_s: seconds after the last act of a fault, before which nothing is over.
    """

    def __init__(self, observe_s: float) -> None:
        self._observe_ns = int(observe_s * 1e9)
        self._highest: int | None = None
        self._newest_ns = deque[int](maxlen=NEW_STEPS)

    def show(self, step: int, t_ns: int) -> None:
        """Note a step that the log shows at a time. Only a step above all before counts."""
        if self._highest is None or step > self._highest:
            self._highest = step
            self._newest_ns.append(t_ns)

    def is_over(self, last_act_ns: int) -> bool:
        """Return whether the log has shown enough new steps since the end of the observation.

        Args:
            last_act_ns: the time at which a fault acted last, or ended.
        """
        has_enough = len(self._newest_ns) == NEW_STEPS
        return has_enough and self._newest_ns[0] >= last_act_ns + self._observe_ns
