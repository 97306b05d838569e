"""An event of a run, for people that look at the platform on which it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A fault, a loss or a recovery.

    Attributes:
        t_ns: its time, on the clock of the run.
        reason: its kind, in one CamelCase word.
        action: the part of the run's life in which it happened: ``Inject``, ``Detect`` or ``Recover``.
        text: a sentence about it, without the name of the run.
        is_warning: whether something was broken or lost, or is not as it was planned.
    """

    t_ns: int
    reason: str
    action: str
    text: str
    is_warning: bool = False
