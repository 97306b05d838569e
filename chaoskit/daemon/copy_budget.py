"""Which commits of a replicated state are copied: so seldom that it costs little, so often that little is at risk.

A copy serves one case: every worker ends inside one and the same update. The steps since the newest copy are then
computed again, so their number is bounded, and so is the time that they took.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

#: Share of the training time that copies may take.
COST_SHARE = 0.01
#: The steps from one copy to the next take no longer than this.
RISK_S = 30.0

_RECENT_STEPS = 15
_RECENT_COPIES = 5
_SKIPS_MAX = 64  # commits without a copy after copies kept failing
_SHORTEST_STEP_S = 1e-6


class CopyBudget:
    """Decides for each commit whether it is copied. A pure state machine.

    Args:
        every_step: copy each commit, whatever it costs.

    Attributes:
        every: each so many commits one is copied, as of the newest copy; so many steps are computed again at most.
        let_go: the newest step that is not going to be copied any more, as far as is known; -1 for none.
    """

    def __init__(self, *, every_step: bool) -> None:
        self._every_step = every_step
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs_s: deque[float] = deque(maxlen=_RECENT_COPIES)
        self._generation = 0
        self.begin(alone=False)

    def begin(self, *, alone: bool) -> None:
        """A membership begins: its first state is copied.

        Args:
            alone: there is one rank or one node, so no other rank has the state: each commit is copied.
        """
        self._always = self._every_step or alone
        self._restart()

    def _restart(self) -> None:
        self._failures = 0
        self._seen: tuple[int, float] | None = None
        self._copied_s: float | None = None
        self.every, self.let_go = 1, -1

    @property
    def due(self) -> int:
        """The next step for whose copy training is to wait longer than for most; 0 for none.

        Copies that are made now and then must not be overtaken: else the next one comes much later.
        """
        return 0 if self._always else self.let_go + 1

    @property
    def seen(self) -> int:
        """The newest step of this membership about which was decided; -1 for none."""
        return self._seen[0] if self._seen is not None else -1

    @property
    def step_s(self) -> float:
        """What a step takes, by the median of the recent ones; 0 before the second commit."""
        return median(self._steps_s) if self._steps_s else 0.0

    @property
    def cost_s(self) -> float:
        """What a copy costs, by the median of the recent ones; 0 before the first."""
        return median(self._costs_s) if self._costs_s else 0.0

    def wants(self, step: int, generation: int, now_s: float) -> bool:
        """Whether the state of ``step`` steps, committed by now, is to be copied.

        Args:
            generation: the one that the state stands in. A membership that waits for a step boundary begins after the
                one before it has committed some more steps.
        """
        if generation != self._generation:
            self._generation = generation
            self._restart()
        if self._seen is not None and step > self._seen[0]:
            self._steps_s.append((now_s - self._seen[1]) / (step - self._seen[0]))
        self._seen = step, now_s
        return step > self.let_go or self._is_late(now_s)

    def _is_late(self, now_s: float) -> bool:
        """Whether the next commit would come too late, if it takes as long as this one: steps have become longer."""
        if self._copied_s is None or self._failures or not self._steps_s:
            return False
        return now_s + max(self.step_s, self._steps_s[-1]) > self._copied_s + RISK_S

    def copied(self, step: int, cost_s: float | None) -> None:
        """The state of ``step`` steps is copied, which was wanted. ``cost_s``: None if the copy was there before."""
        if cost_s is not None:
            self._costs_s.append(cost_s)
        self._failures = 0
        self._copied_s = self._seen[1] if self._seen is not None else None
        self.every = self._affordable()
        self.let_go = step + self.every - 1

    def failed(self, step: int) -> None:
        """No copy of that state was made: it is tried with the next commit, and then ever more seldom."""
        self._failures += 1
        self.let_go = step + min(_SKIPS_MAX, 2**self._failures - 2)

    def _affordable(self) -> int:
        if self._always or not self._steps_s or not self._costs_s:
            return 1
        step_s = max(self.step_s, _SHORTEST_STEP_S)
        wanted = math.ceil(self.cost_s / (COST_SHARE * step_s))
        return max(1, min(wanted, int(RISK_S / step_s)))
