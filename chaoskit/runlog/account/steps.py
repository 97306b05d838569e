"""Committed steps: the time of each, and whether its result was kept.

-> runlog/account/spending.py: the time that is moved from purpose to purpose. runlog/history.py:
the steps of a run that is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from chaoskit.journal import Record
from chaoskit.runlog.account import time_account as parts
from chaoskit.runlog.account.spending import HeldTime, Purpose, Spending
from chaoskit.vocabulary import Event

_USUAL_STEPS = 32
_STEPS_KEPT = 100_000  # a rollback of more steps counts the older ones twice


@dataclass(slots=True)
class AccountedStep:
    """A committed step of one generation. ``spent_ns`` includes its stall.

    Attributes:
        number: the number of the step.
        generation: the generation that committed it.
        world: the number of ranks.
        skipped: the batch was skipped.
        allowance_ns: for a first good step, the productive time; the time beyond it was spent on
            ``excess``.
        excess: the purpose of that time.
        held: the time of the step, which may be moved to another purpose.
        spent_ns: the time of the step.
        stalled_ns: the part of it in which ranks waited for a copy of the state.
        degraded_ns: the time in a smaller world.
        missing_ns: that time, weighted with the share of ranks that were missing.
    """

    number: int
    generation: int
    world: int
    skipped: bool
    allowance_ns: int | None = None
    excess: Purpose = ("", "")
    held: HeldTime = field(default_factory=HeldTime)
    spent_ns: int = 0
    stalled_ns: int = 0
    degraded_ns: int = 0
    missing_ns: float = 0.0

    @property
    def purpose(self) -> Purpose:
        """The purpose of the step's time: productive, or recomputed if the batch was skipped."""
        return (
            (parts.RECOMPUTED, "nonfinite")
            if self.skipped
            else (parts.PRODUCTIVE, parts.PRODUCTIVE)
        )


class Steps:
    """The steps of one run, and the spending of their time.

    Args:
        full_world: the number of ranks of the full world; 0 while it is not known.
        on_step: called with the nanoseconds of every step, skipped ones too, when it is finished.

    Attributes:
        step: the highest step that was committed or skipped; -1 before the first.
        generation, world: those of the newest step, committed or skipped; 0 before the first.
        loss: the loss of the newest committed step, or None.
        current: the step that ranks commit now; None between two steps.
        degraded_ns: the time spent on kept steps of a smaller world.
        missing_ns: that time, weighted with the share of ranks that were missing (0 to 1).
    """

    def __init__(self, full_world: int, on_step: Callable[[int], None]) -> None:
        self.step, self.generation, self.world = -1, 0, 0
        self.loss: float | None = None
        self.full_world = full_world
        self.current: AccountedStep | None = None
        self.degraded_ns, self.missing_ns = 0, 0.0
        self._on_step = on_step
        self._committed: dict[int, AccountedStep] = {}
        self._usual_ns: deque[int] = deque(maxlen=_USUAL_STEPS)

    @property
    def usual_ns(self) -> int | None:
        """The median duration of the last usual steps in ns; None before there are any.

        Skipped steps and the first good steps of recoveries do not count.
        """
        return int(median(self._usual_ns)) if self._usual_ns else None

    def committed(self, record: Record) -> AccountedStep | None:
        """Return the earlier commit of the record's step, in any generation, or None."""
        return self._committed.get(record["step"])

    def begin(self, record: Record) -> AccountedStep:
        """Begin a step when its first rank commits or skips it, and return it.

        It replaces an earlier commit of the same number.
        """
        number, generation = record["step"], record["generation"]
        step = AccountedStep(number, generation, record["world"], record.event == Event.SKIP)
        self._committed[number] = self.current = step
        if len(self._committed) > _STEPS_KEPT:
            del self._committed[next(iter(self._committed))]
        self.step, self.generation, self.world = max(self.step, number), generation, record["world"]
        if record.event == Event.COMMIT:
            self.loss = record["loss"]
        return step

    def finish(self) -> None:
        """End the current step, since no further rank commits it, and report its time.

        Nothing happens between two steps.
        """
        step, self.current = self.current, None
        if step is not None:
            if step.allowance_ns is None and not step.skipped:
                self._usual_ns.append(step.spent_ns)
            self._on_step(step.spent_ns)

    # -- their time --------------------------------------------------------------------------------

    def spend(self, spending: Spending, step: AccountedStep, until_ns: int) -> None:
        """Spend the time up to ``until_ns`` on ``step``; the time beyond its allowance on excess."""
        if step.allowance_ns is None:
            self._book(step, spending.spend(step.purpose, until_ns, step.held))
            return
        limit_ns = spending.cursor_ns + max(0, step.allowance_ns - step.spent_ns)
        self._book(step, spending.spend(step.purpose, min(limit_ns, until_ns), step.held))
        spending.spend(step.excess, until_ns)

    def stall(self, spending: Spending, step: AccountedStep, stall_ns: int) -> None:
        """Move the time of a rank's wait for a copy of the state to stalls.

        The slowest rank counts. Waits in a skipped step stay where they are.
        """
        more_ns = min(stall_ns, step.spent_ns) - step.stalled_ns
        if more_ns > 0 and not step.skipped:
            step.stalled_ns += more_ns
            spending.move(step.held, (parts.STALLED, parts.CHECKPOINT), more_ns)

    def credit(self, spending: Spending, step: AccountedStep, held_time: HeldTime) -> None:
        """Move time that seemed wasted to ``step``, which kept its result."""
        spending.move(held_time, step.purpose)
        self._book(step, sum(piece.amount_ns for piece in held_time.pieces))
        step.held.pieces += held_time.pieces
        held_time.pieces = []

    def throw_away(self, spending: Spending, number: int, generation: int, cause: str) -> None:
        """Move the time of steps from ``number`` on to recomputed, and forget these steps.

        Only steps of generations before ``generation`` are moved.

        Args:
            spending: the spending of the run's time.
            number: the first step.
            generation: the generation that computes these steps again.
            cause: the cause of the setback.
        """
        for later_number in range(number, self.step + 1):
            step = self._committed.get(later_number)
            if step is None or step.generation >= generation:
                continue
            del self._committed[later_number]
            if not step.skipped:
                spending.move(step.held, (parts.RECOMPUTED, cause))
                self.degraded_ns -= step.degraded_ns
                self.missing_ns -= step.missing_ns

    def _book(self, step: AccountedStep, amount_ns: int) -> None:
        """Add an amount of time to a step, and to the degraded time if its world is smaller."""
        step.spent_ns += amount_ns
        if step.world < self.full_world and not step.skipped:
            missing_ns = amount_ns * (1 - step.world / self.full_world)
            step.degraded_ns, step.missing_ns = (
                step.degraded_ns + amount_ns,
                step.missing_ns + missing_ns,
            )
            self.degraded_ns, self.missing_ns = (
                self.degraded_ns + amount_ns,
                self.missing_ns + missing_ns,
            )
