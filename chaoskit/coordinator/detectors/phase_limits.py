"""How long a phase of a step may last before its rank is suspected of a hang: a pure state machine.

A rank that computes for long and one that never returns look the same. What tells them apart is how long phases of this
job have lasted so far, and what an error costs: a suspect that was healthy costs one recovery. Waiting for as long as a
recovery takes, beyond the longest phase that ended by itself, at most doubles the cost of the best decision, whatever
the durations are (the ski rental problem; Karlin et al., Competitive snoopy caching, Algorithmica 3, 1988).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.coordinator.membership.events import Suspicion
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire.messages import Beat

#: Steps of one process after which the phases of the job count as known.
KNOWN_STEPS = 2
#: After ``n`` steps a phase may last ``1 + YOUNG_STEPS / n`` times the longest one seen: few steps show few durations.
YOUNG_STEPS = 20
#: The first step of a process in a generation may take so many times the allowance of a later one.
FIRST_STEP_ALLOWANCES = 4.0
#: Steps without a suspect after which a limit that suspects have raised is halved.
CALM_STEPS = 1000
#: A limit has moved notably once it is so many times what it was, or a fraction of it.
NOTABLE = 1.25


class PhaseLimits:
    """Learns from the heartbeat pages of all ranks and from what recoveries took.

    Attributes:
        suspects: ranks that were given up on suspicion.
    """

    def __init__(self, config: RunConfig) -> None:
        self._floor_s = config.hang_floor_ms / 1000
        self._hang_steps = config.hang_steps
        self._longest_s = dict.fromkeys(TIMED_PHASES, 0.0)
        self._suspected_s = dict.fromkeys(TIMED_PHASES, 0.0)  # age of the oldest suspect
        self._raised_s = dict.fromkeys(
            TIMED_PHASES, 0.0
        )  # twice the limit at which the last suspect was found
        self._steps = 0
        self._reached = 0
        self._calm_from: int | None = None  # None until ranks tell of their steps
        self._cure_s = 0.0
        self.suspects = 0
        self._told: tuple[dict[str, int], int] = ({}, 0)

    @property
    def are_known(self) -> bool:
        """Whether enough steps were seen to judge phases by their durations."""
        return self._steps >= KNOWN_STEPS

    @property
    def allowance_s(self) -> float:
        """Time that a phase has beyond what is known of it: what a recovery took here, ``hang_floor_ms`` at least."""
        return max(self._floor_s, self._cure_s)

    def longest_s(self, phase: Phase) -> float:
        """The longest phase of this kind that ended by itself, on any rank; a suspect counts with its age."""
        return max(self._longest_s[phase], self._suspected_s[phase])

    def learn(self, beats: Iterable[Beat]) -> None:
        """Take in the counters of the heartbeat pages."""
        for beat in beats:
            self._steps = max(self._steps, beat.commits)
            self._reached = max(self._reached, beat.step)
            for phase, longest_ms in zip(TIMED_PHASES, beat.longest_ms, strict=False):
                self._longest_s[phase] = max(self._longest_s[phase], longest_ms / 1000)
        if self._calm_from is None:
            self._calm_from = self._reached
        while self._reached - self._calm_from >= CALM_STEPS:
            self._calm_from += CALM_STEPS
            self._raised_s = {phase: raised_s / 2 for phase, raised_s in self._raised_s.items()}

    def cured(self, took_s: float) -> None:
        """A new generation committed its first step ``took_s`` seconds after its plan was published."""
        self._cure_s = took_s

    def suspect(self, suspicion: Suspicion) -> None:
        """A rank was ended that may have been healthy, now or by an earlier coordinator: the next has twice the time.

        A phase of which nothing is learned (code between two steps) has a limit of its own, which stays.
        """
        phase = suspicion.phase
        if phase not in TIMED_PHASES:
            return
        self.suspects += 1
        if self._calm_from is not None:
            self._calm_from = self._reached
        self._suspected_s[phase] = max(self._suspected_s[phase], suspicion.age_s)
        self._raised_s[phase] = max(self._raised_s[phase], 2 * suspicion.limit_s)

    def limit_s(self, phase: Phase, step_s: float, *, first: bool = False) -> float:
        """Return the age in seconds at which a phase is suspicious.

        The age of a suspect is not multiplied while few steps are known: it may never have ended.

        Args:
            step_s: median of the recent steps; 0 where it is not known.
            first: the process has not committed a step in its generation yet.
        """
        young = 1 + YOUNG_STEPS / max(self._steps, KNOWN_STEPS)
        allowance_s = self.allowance_s * (FIRST_STEP_ALLOWANCES if first else 1.0)
        known_s = max(self._longest_s[phase] * young, self._suspected_s[phase]) + allowance_s
        return max(self._hang_steps * step_s, known_s, self._raised_s[phase])

    def news(self, step_s: float) -> dict[str, Any] | None:
        """Return the fields of a record ``hang_limits``, if a limit has moved notably since they were last returned."""
        if not self.are_known:
            return None
        limits = {phase.label: round(self.limit_s(phase, step_s) * 1000) for phase in TIMED_PHASES}
        before, suspects = self._told
        if (
            suspects == self.suspects
            and before
            and all(_is_near(limits[name], before[name]) for name in limits)
        ):
            return None
        self._told = limits, self.suspects
        longest = {phase.label: round(self.longest_s(phase) * 1000) for phase in TIMED_PHASES}
        allowance_ms = round(self.allowance_s * 1000)
        return {
            "limits_ms": limits,
            "longest_ms": longest,
            "allowance_ms": allowance_ms,
            "suspects": self.suspects,
        }


def _is_near(value: float, before: float) -> bool:
    return before / NOTABLE <= value <= before * NOTABLE
