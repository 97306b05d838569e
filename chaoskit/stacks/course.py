"""The course of a training, as the logs of its nodes tell it: which steps were shown when, how often, with which loss.

Several ranks may print the same step, so a step that is shown twice was not computed again by that alone. How often an
unbroken run shows it is known from the twin, or else guessed from the steps before the first fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chaoskit.stacks.log import Line


@dataclass
class Shown:
    """One step. ``at_ns``: every time that it was shown. ``losses``: those of its last attempt, in order."""

    at_ns: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    attempt: int = 1


class Usual:
    """How often an unbroken run shows each step: as ``counts`` say, other steps as often as most of those."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._counts = counts
        self._other = Counter(counts.values()).most_common(1)[0][0] if counts else 1

    def __call__(self, step: int) -> int:
        return self._counts.get(step, self._other)

    @classmethod
    def before(cls, lines: Iterable[Line], t_ns: float) -> Usual:
        """Where there is no twin: as often as most steps of this run before its first fault."""
        counts = Counter(line.step for line in lines if line.step is not None and line.t_ns <= t_ns)
        usual = cls(counts)
        usual._counts = {}  # not every step of a broken run is whole
        return usual


class Course:
    """The steps that ``lines`` show, which are in the order in which they were read.

    Attributes:
        usual: how often an unbroken run shows a step.
    """

    def __init__(self, lines: Iterable[Line], usual: Usual | None = None) -> None:
        self.usual = usual or Usual({})
        self.steps: dict[int, Shown] = {}
        self.records: list[
            tuple[int, int]
        ] = []  # (time, step), whenever a step was higher than all before
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
        if not self.records or step > self.records[-1][1]:
            self.records.append((t_ns, step))
        if self._in_attempt[step] >= self.usual(
            step
        ):  # once more than in one attempt: it has begun again
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
        """The highest step that was shown."""
        return self.records[-1][1] if self.records else None

    def highest_before(self, t_ns: float) -> int:
        """The highest step that was shown by then; -1 if none was."""
        return max((step for at_ns, step in self.records if at_ns <= t_ns), default=-1)

    def next_record(self, t_ns: float) -> tuple[int, int] | None:
        """When the first step was shown that is higher than all by that time, and which: (time, step)."""
        return next((record for record in self.records if record[0] > t_ns), None)

    def went_back(self, t_ns: float, until_ns: float) -> int | None:
        """The lowest step that was shown again in this time; None if none was."""
        again = [
            step
            for step, shown in self.steps.items()
            if len(shown.at_ns) > self.usual(step)
            and shown.at_ns[0] <= t_ns
            and any(t_ns < at_ns <= until_ns for at_ns in shown.at_ns)
        ]
        return min(again, default=None)

    def counts(self) -> dict[int, int]:
        """How often each step was shown."""
        return {step: len(shown.at_ns) for step, shown in self.steps.items()}

    def lost_steps(self) -> int:
        """Steps that were shown, and that were computed again all the same; each as often as that happened."""
        return sum(
            math.ceil(len(shown.at_ns) / self.usual(step)) - 1 for step, shown in self.steps.items()
        )

    def losses(self) -> dict[int, tuple[float, ...]]:
        """The different losses of each step that has one, in its last attempt; those that are not numbers first."""
        return {step: distinct(shown.losses) for step, shown in self.steps.items() if shown.losses}


def went_back(lines: Iterable[Line]) -> tuple[str, int, int] | None:
    """Return where a training began again by itself: node, the step before, and the lower one after; None: nowhere.

    Ranks that print side by side show every step equally often, and in order. A step is shown again after a higher one,
    and more often than others of its node, where it was computed again.
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
    """Each value once, in order. Two NaN are one."""
    by_text = {repr(loss): loss for loss in losses}
    return tuple(sorted(by_text.values(), key=lambda loss: (not math.isnan(loss), loss)))


def differs(mine: tuple[float, ...], theirs: tuple[float, ...], tolerance: float) -> bool:
    """Whether the losses of a step are others than the unbroken run's."""
    if repr(mine) == repr(theirs):
        return False
    return not (
        all(any(_near(one, other, tolerance) for other in theirs) for one in mine)
        and all(any(_near(one, other, tolerance) for one in mine) for other in theirs)
    )


def _near(mine: float, theirs: float, tolerance: float) -> bool:
    if repr(mine) == repr(theirs):
        return True
    return tolerance > 0 and abs(mine - theirs) <= tolerance * max(1.0, abs(theirs))
