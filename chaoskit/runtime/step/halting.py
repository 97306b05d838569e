"""The order to end after a step, before the script would: given to the control thread, obeyed by the main thread."""

from __future__ import annotations

import math


class TrainingHalted(BaseException):
    """Leaves the train function where the job is to end; not caught by ``except Exception`` in the user's code."""


class HaltOrder:
    """The step after which this worker ends.

    Attributes:
        step: committed steps at which the next transaction is not entered any more; infinity without an order.
        is_obeyed: whether the train function was left because of it.
    """

    def __init__(self) -> None:
        self.step = math.inf
        self.is_obeyed = False

    def give(self, step: int) -> None:
        """Order the end after ``step``. Called by the control thread."""
        self.step = min(self.step, step)

    def is_due(self, step: int) -> bool:
        """Return whether no transaction is to be entered any more once ``step`` steps are committed."""
        return step >= self.step

    def obey(self, step: int) -> None:
        """Called by the main thread, before a transaction that would take the step after ``step``.

        Raises:
            TrainingHalted: if this worker is to end.
        """
        if self.is_due(step):
            self.is_obeyed = True
            raise TrainingHalted
