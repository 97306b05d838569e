"""Choice of the commits of a replicated state that are copied, within a cost and a risk.

A copy is needed in one case only: all workers end inside the same update. The steps since the
newest copy are then computed again, so their number and their time are limited.

-> ``daemon/replica_keeper.py``: makes the copies. ``checkpoint/memory/tier.py``: keeps them.
-> ``process/progress_board.py``: how a worker waits for a copy.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: Share of the training time that copies may take.
COST_SHARE = 0.01
#: Limit of the time between two copies.
RISK_S = 30.0

_RECENT_STEPS = 15
_RECENT_COPIES = 5
_SKIPS_MAX = 64  # most commits without a copy while copies keep failing
_SHORTEST_STEP_S = 1e-6


class CopyBudget:
    """A pure state machine that decides for each commit whether it is copied.

    Args:
        every_step: copy each commit, at any cost.

    Attributes:
        every: number of commits from one copy to the next, as of the newest copy. At most as many
            steps are computed again.
        skipped_until: the last of the next steps that are not copied, unless the time limit is
            near; -1 for none.
    """

    def __init__(self, *, every_step: bool) -> None:
        self._every_step = every_step
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs_s: deque[float] = deque(maxlen=_RECENT_COPIES)
        self._generation = 0
        self.begin(alone=False)

    def begin(self, *, alone: bool) -> None:
        """Begin a membership, whose first state is copied.

        Args:
            alone: True for a single rank or node: no other rank has the state, so each commit is
                copied.
        """
        self._copies_each = self._every_step or alone
        self._restart()

    def _restart(self) -> None:
        """Forget the commits and copies of the last generation."""
        self._failures = 0
        self._seen: tuple[int, float] | None = None
        self._copied_s: float | None = None
        self.every, self.skipped_until = 1, -1

    @property
    def due(self) -> int:
        """The next step for whose copy training should wait longer than for most; 0 for none.

        Training must not overtake rare copies, or the next one would come much later.
        """
        return 0 if self._copies_each else self.skipped_until + 1

    @property
    def seen(self) -> int:
        """The newest step of this membership that was decided on; -1 for none."""
        return self._seen[0] if self._seen is not None else -1

    @property
    def step_s(self) -> float:
        """The median duration of recent steps in seconds; 0 before the second commit."""
        return median(self._steps_s) if self._steps_s else 0.0

    @property
    def cost_s(self) -> float:
        """The median cost of recent copies in seconds of CPU time; 0 before the first."""
        return median(self._costs_s) if self._costs_s else 0.0

    def wants(self, step: int, generation: int, now_s: float) -> bool:
        """Return True if the committed state of ``step`` steps is to be copied.

        The commit and its time are remembered. Call this once for each commit.

        Args:
            generation: generation of the state. A membership that waits for a step boundary begins
                after its predecessor has committed some more steps.
            now_s: present time on any clock in seconds.
        """
        if generation != self._generation:
            self._generation = generation
            self._restart()
        if self._seen is not None and step > self._seen[0]:
            self._steps_s.append((now_s - self._seen[1]) / (step - self._seen[0]))
        self._seen = step, now_s
        return step > self.skipped_until or self._is_late(now_s)

    def _is_late(self, now_s: float) -> bool:
        """Return True if the next commit would exceed the time limit. Steps may grow longer."""
        if self._copied_s is None or self._failures or not self._steps_s:
            return False
        return now_s + max(self.step_s, self._steps_s[-1]) > self._copied_s + RISK_S

    def copied(self, step: int, cost_s: float | None) -> None:
        """Note that a state was copied, and set :attr:`every` and :attr:`skipped_until`.

        Args:
            step: step of the state.
            cost_s: CPU time of the copy; None if the copy existed before.
        """
        if cost_s is not None:
            self._costs_s.append(cost_s)
        self._failures = 0
        self._copied_s = self._seen[1] if self._seen is not None else None
        self.every = self._affordable_interval()
        self.skipped_until = step + self.every - 1

    def failed(self, step: int) -> None:
        """Note that a copy failed.

        It is tried again with the next commit, and then ever more rarely.
        """
        self._failures += 1
        self.skipped_until = step + min(_SKIPS_MAX, 2**self._failures - 2)

    def _affordable_interval(self) -> int:
        """Return the interval between copies that the budget allows, in commits."""
        if self._copies_each or not self._steps_s or not self._costs_s:
            return 1
        step_s = max(self.step_s, _SHORTEST_STEP_S)
        affordable = math.ceil(self.cost_s / (COST_SHARE * step_s))
        return max(1, min(affordable, int(RISK_S / step_s)))
