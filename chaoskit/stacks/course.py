"""The course of a training in the logs of its nodes: the time, frequency and loss of each step.

Several ranks may print the same step, so a step that is shown twice was not necessarily computed
again. The usual frequency comes from the twin, or else from the steps before the first fault.

-> ``stacks/log.py``: how lines are read. ``stacks/felt.py``: the effect of a fault in them.
``experiment/judge/command_judge.py``: which of them fail a run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chaoskit.stacks.log import CommandLogLine


@dataclass
class Shown:
    """A step in the logs.

    Attributes:
        at_ns: the times at which the step was shown.
        losses: the losses of its last attempt, in the order of the lines.
        attempt: the number of that attempt, from 1.
    """

    at_ns: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    attempt: int = 1


class Usual:
    """The number of times that an unbroken run shows each step.

    Args:
        counts: step -> how often it is shown. Other steps are shown as often as most of these.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts
        self._other = Counter(counts.values()).most_common(1)[0][0] if counts else 1

    def __call__(self, step: int) -> int:
        return self._counts.get(step, self._other)

    @classmethod
    def before(cls, lines: Iterable[CommandLogLine], t_ns: float) -> Usual:
        """Return the usual numbers of a run without a twin, by its lines up to ``t_ns``.

        Every step counts as shown as often as most of those steps. ``t_ns`` is the time of the
        first fault.
        """
        counts = Counter(line.step for line in lines if line.step is not None and line.t_ns <= t_ns)
        usual = cls(counts)
        usual._counts = {}  # the last step before a fault may be incomplete
        return usual


class Course:
    """The steps that ``lines`` show, in the order in which the lines were read.

    Attributes:
        usual: returns how often an unbroken run shows a step.
        steps: step -> its lines.
        records: (time in ns, step) of each step that was higher than all before.
    """

    def __init__(self, lines: Iterable[CommandLogLine], usual: Usual | None = None) -> None:
        self.usual = usual or Usual({})
        self.steps: dict[int, Shown] = {}
        # (time, step), whenever a step was higher than all before
        self.records: list[tuple[int, int]] = []
        self._attempt, self._in_attempt = 1, Counter[int]()
        latest: dict[str, int] = {}
        for line in lines:
            if line.step is not None:
                latest[line.node] = line.step
                self._show(line.step, line.t_ns)
            step = latest.get(line.node)
            if step is not None and line.loss is not None:
                self.steps[step].losses.append(float(line.loss))
        self.steps = dict(sorted(self.steps.items()))

    def _show(self, step: int, t_ns: int) -> None:
        """Add a step that a line shows to ``steps``, and to ``records`` if it is the highest.

        A step that is shown more often than usual begins a new attempt.
        """
        if not self.records or step > self.records[-1][1]:
            self.records.append((t_ns, step))
        # more often than in one attempt, so a new one has begun
        if self._in_attempt[step] >= self.usual(step):
            self._attempt += 1
            self._in_attempt.clear()
        self._in_attempt[step] += 1
        shown = self.steps.setdefault(step, Shown())
        shown.at_ns.append(t_ns)
        if shown.attempt != self._attempt:
            shown.attempt = self._attempt
            shown.losses.clear()

    @property
    def highest(self) -> int | None:
        """The highest step that was shown; None if none was."""
        return self.records[-1][1] if self.records else None

    def highest_before(self, t_ns: float) -> int:
        """Return the highest step that was shown by a time; -1 if none was."""
        return max((step for at_ns, step in self.records if at_ns <= t_ns), default=-1)

    def next_record(self, t_ns: float) -> tuple[int, int] | None:
        """Return (time, step) of the first new highest step after a time; None for none."""
        return next((record for record in self.records if record[0] > t_ns), None)

    def went_back(self, t_ns: float, until_ns: float) -> int | None:
        """Return the lowest step that was shown again after ``t_ns`` and by ``until_ns``, or None.

        Only lines that show a step more often than usual count.
        """
        again = [
            step
            for step, shown in self.steps.items()
            if shown.at_ns[0] <= t_ns
            and any(t_ns < at_ns <= until_ns for at_ns in shown.at_ns[self.usual(step) :])
        ]
        return min(again, default=None)

    def counts(self) -> dict[int, int]:
        """Return how often each step was shown."""
        return {step: len(shown.at_ns) for step, shown in self.steps.items()}

    def lost_steps(self) -> int:
        """Return the number of times that steps were computed again after they had been shown."""
        return sum(
            math.ceil(len(shown.at_ns) / self.usual(step)) - 1 for step, shown in self.steps.items()
        )

    def losses(self) -> dict[int, tuple[float, ...]]:
        """Return the different losses of each step in its last attempt; NaN comes first.

        Steps without a loss are left out.
        """
        return {step: distinct(shown.losses) for step, shown in self.steps.items() if shown.losses}


def went_back(lines: Iterable[CommandLogLine]) -> tuple[str, int, int] | None:
    """Return where a training began again by itself: node, step before, step after; or None.

    Ranks that print side by side show every step equally often, and in order. A step that was
    computed again is shown after a higher one, and more often than others of its node.
    """
    by_node: dict[str, list[int]] = {}
    for line in lines:
        if line.step is not None:
            by_node.setdefault(line.node, []).append(line.step)
    for node, steps in by_node.items():
        counts, highest = Counter(steps), steps[0]
        least = min(counts.values())
        for step in steps:
            if step < highest and counts[step] > least:
                return node, highest, step
            highest = max(highest, step)
    return None


def distinct(losses: Iterable[float]) -> tuple[float, ...]:
    """Return each loss once, the smallest first and NaN before it; two NaN count as one."""
    by_text = {repr(loss): loss for loss in losses}
    return tuple(sorted(by_text.values(), key=lambda loss: (not math.isnan(loss), loss)))


def differs(own: tuple[float, ...], reference: tuple[float, ...], tolerance: float) -> bool:
    """Return whether the losses of a step differ from those of the unbroken run.

    Each loss of one side must be close to any of the other.

    Args:
        tolerance: allowed difference as a fraction of the reference (absolute if that is below 1);
            0 if the numbers must be equal.
    """
    if repr(own) == repr(reference):
        return False
    return not (
        all(
            any(_near(own_loss, reference_loss, tolerance) for reference_loss in reference)
            for own_loss in own
        )
        and all(
            any(_near(own_loss, reference_loss, tolerance) for own_loss in own)
            for reference_loss in reference
        )
    )


def _near(own: float, reference: float, tolerance: float) -> bool:
    """Return whether two losses are equal within a tolerance, which is that of :func:`differs`."""
    if repr(own) == repr(reference):
        return True
    return tolerance > 0 and abs(own - reference) <= tolerance * max(1.0, abs(reference))
