"""The order to end after a step, earlier than the script would.

The control thread gives it, and the main thread obeys it.

-> coordinator/schedules/save_schedule.py: which step; coordinator/handlers/on_end.py orders it.
"""

from __future__ import annotations

import math


class TrainingHalted(BaseException):
    """Leaves the train function where the job must end.

    It is a ``BaseException``, so that ``except Exception`` in user code does not catch it.
    """


class HaltOrder:
    """The step after which this worker ends, shared by control thread and main thread.

    Attributes:
        step: the number of committed steps at which no further transaction is entered; infinity
            without an order.
        is_obeyed: True if the train function was left because of the order.
    """

    def __init__(self) -> None:
        self.step = math.inf
        self.is_obeyed = False

    def give(self, step: int) -> None:
        """Order the end after ``step``; the earliest order counts. Called by the control thread."""
        self.step = min(self.step, step)

    def is_due(self, step: int) -> bool:
        """Return whether no transaction may be entered once ``step`` steps are committed."""
        return step >= self.step

    def obey(self, step: int) -> None:
        """Leave the train function if the order is due.

        Called by the main thread before a transaction, with the number of committed steps.

        Raises:
            TrainingHalted: if this worker must end.
        """
        if self.is_due(step):
            self.is_obeyed = True
            raise TrainingHalted
