"""Committed steps: what each of them took, and which of them live on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from chaoskit.journal import Record
from chaoskit.runlog.account import time_account as parts
from chaoskit.runlog.account.spending import Holding, Purpose, Spending
from chaoskit.vocabulary import Event

_USUAL_STEPS = 32
_STEPS_KEPT = 100_000  # a rollback beyond these counts its steps twice


@dataclass(slots=True)
class AccountedStep:
    """A committed step of one generation. ``spent_ns`` holds its stall, too.

    Attributes:
        allowance_ns: of a first good step: what is beyond it was spent on ``excess``.
    """

    number: int
    generation: int
    world: int
    skipped: bool
    allowance_ns: int | None = None
    excess: Purpose = ("", "")
    held: Holding = field(default_factory=Holding)
    spent_ns: int = 0
    stalled_ns: int = 0
    degraded_ns: int = 0
    missing_ns: float = 0.0

    @property
    def purpose(self) -> Purpose:
        """What its time is spent on."""
        return (
            (parts.RECOMPUTED, "nonfinite")
            if self.skipped
            else (parts.PRODUCTIVE, parts.PRODUCTIVE)
        )


class Steps:
    """Keeps the steps of one run, and books their time.

    Args:
        full_world: ranks of the full world; 0 while nobody knows.
        on_step: is told the nanoseconds of every committed step.

    Attributes:
        step, generation, world, loss: of the newest commit; -1, 0, 0 and None before it.
        current: that ranks commit now; None between two.
        degraded_ns: spent on steps of a smaller world; ``missing_ns`` weighs it with the share that was missing.
    """

    def __init__(self, full_world: int, on_step: Callable[[int], None]) -> None:
        self.step, self.generation, self.world = -1, 0, 0
        self.loss: float | None = None
        self.full_world = full_world
        self.current: AccountedStep | None = None
        self.degraded_ns, self.missing_ns = 0, 0.0
        self._on_step = on_step
        self._known: dict[int, AccountedStep] = {}
        self._usual_ns: deque[int] = deque(maxlen=_USUAL_STEPS)

    @property
    def usual_ns(self) -> int | None:
        """Median of the last steps; None before there are some."""
        return int(median(self._usual_ns)) if self._usual_ns else None

    def known(self, record: Record) -> AccountedStep | None:
        """The step of that number that was committed before, whatever its generation."""
        return self._known.get(record["step"])

    def begin(self, record: Record) -> AccountedStep:
        """The first rank commits a step."""
        number, generation = record["step"], record["generation"]
        step = AccountedStep(number, generation, record["world"], record.event == Event.SKIP)
        self._known[number] = self.current = step
        if len(self._known) > _STEPS_KEPT:
            del self._known[next(iter(self._known))]
        self.step, self.generation, self.world = max(self.step, number), generation, record["world"]
        if record.event == Event.COMMIT:
            self.loss = record["loss"]
        return step

    def finish(self) -> None:
        """No rank commits the current step any more."""
        step, self.current = self.current, None
        if step is not None:
            if step.allowance_ns is None and not step.skipped:
                self._usual_ns.append(step.spent_ns)
            self._on_step(step.spent_ns)

    # -- their time -----------------------------------------------------------------------------------------------

    def spend(self, spending: Spending, step: AccountedStep, until_ns: int) -> None:
        """The time up to ``until_ns`` was for ``step``."""
        if step.allowance_ns is None:
            self._book(step, spending.spend(step.purpose, until_ns, step.held))
            return
        limit_ns = spending.cursor_ns + max(0, step.allowance_ns - step.spent_ns)
        self._book(step, spending.spend(step.purpose, min(limit_ns, until_ns), step.held))
        spending.spend(step.excess, until_ns)

    def stall(self, spending: Spending, step: AccountedStep, stall_ns: int) -> None:
        """A rank has waited so long for a copy of the state; the slowest rank counts."""
        more_ns = min(stall_ns, step.spent_ns) - step.stalled_ns
        if more_ns > 0 and not step.skipped:
            step.stalled_ns += more_ns
            spending.move(step.held, (parts.STALLED, parts.CHECKPOINT), more_ns)

    def credit(self, spending: Spending, step: AccountedStep, held: Holding) -> None:
        """What seemed to be in vain was for ``step``."""
        spending.move(held, step.purpose)
        self._book(step, sum(piece.amount_ns for piece in held.pieces))
        step.held.pieces += held.pieces
        held.pieces = []

    def throw_away(self, spending: Spending, number: int, generation: int, cause: str) -> None:
        """Training went back to step ``number`` in ``generation``: what was further does not live on."""
        for later in range(number, self.step + 1):
            step = self._known.get(later)
            if step is None or step.generation >= generation:
                continue
            del self._known[later]
            if not step.skipped:
                spending.move(step.held, (parts.RECOMPUTED, cause))
                self.degraded_ns -= step.degraded_ns
                self.missing_ns -= step.missing_ns

    def _book(self, step: AccountedStep, amount_ns: int) -> None:
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
