"""An event of a run, shown to people on the platform that the run uses.

-> ``kubernetes/events.py`` writes it as an Event of the API server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A fault, a loss or a recovery.

    Attributes:
        t_ns: time of the event, on the clock of the run.
        reason: kind of the event, in one CamelCase word.
        action: phase of the run's life that it belongs to: ``Inject``, ``Detect`` or ``Recover``.
        text: a sentence about it, without the name of the run.
        is_warning: True if something was broken, lost, or differs from the plan.
    """

    t_ns: int
    reason: str
    action: str
    text: str
    is_warning: bool = False
