"""Results of second jobs that later runs of a session use again.

-> attach/twin/run.py runs a second job.
"""

from __future__ import annotations

from chaoskit.attach.twin.progress import StepGoal
from chaoskit.experiment.twin.command_twin import CommandTwin


class JobTwins:
    """The unbroken runs of second jobs so far, by all that they depend on.

    A job goes on between two runs, so a later run needs later steps. A result that ends before
    them is of no use to it.
    """

    def __init__(self) -> None:
        self._twins: dict[str, CommandTwin] = {}

    def get(self, key: str, goal: StepGoal) -> CommandTwin | None:
        """Return the result that holds the steps to compare, or None."""
        twin = self._twins.get(key)
        covers = twin is not None and twin.highest is not None and twin.highest >= goal.last
        return twin if covers else None

    def put(self, key: str, twin: CommandTwin) -> None:
        """Store a result, unless the second job failed: another attempt may succeed."""
        if not twin.failure:
            self._twins[key] = twin
