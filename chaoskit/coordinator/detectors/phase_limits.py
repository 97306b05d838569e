"""The limits of the phases of a step, beyond which a rank is suspected: pure.

A rank that computes for long and a rank that never returns look the same. The limit follows from
two facts: how long the phases of this job have lasted so far, and the cost of an error. A suspect
that was healthy costs one recovery. The limit is therefore the longest phase that ended by itself,
plus the time of a recovery. This at most doubles the cost of the best decision, whatever the
durations are (the ski rental problem; Karlin et al., Competitive snoopy caching, Algorithmica 3,
1988).

-> coordinator/detectors/hang.py compares the phases with the limits, and has those of phases
outside of a step. process/progress_board.py measures the phases. config.py: ``hang_floor_ms`` and
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chaoskit.config import RunConfig
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire.messages import Beat, Suspicion

#: Steps of one process after which the phases of the job count as known.
KNOWN_STEPS = 2
#: After ``n`` steps a phase may last ``1 + YOUNG_STEPS / n`` times the longest one so far: few
#: steps show few durations.
YOUNG_STEPS = 20
#: Factor of the allowance for the first step of a process in a generation.
FIRST_STEP_ALLOWANCES = 4.0
#: Steps without a suspect after which a limit that suspects have raised is halved.
CALM_STEPS = 1000
#: Factor by which a limit must have risen or fallen to be reported again.
NOTABLE = 1.25


class PhaseLimits:
    """Limits of the phases of a step, learnt from all ranks and from the durations of recoveries.

    Attributes:
        suspects: the number of ranks that were given up on suspicion.
    """

    def __init__(self, config: RunConfig) -> None:
        self._floor_s = config.hang_floor_ms / 1000
        self._hang_steps = config.hang_steps
        self._longest_s = dict.fromkeys(TIMED_PHASES, 0.0)
        self._suspected_s = dict.fromkeys(TIMED_PHASES, 0.0)  # age of the oldest suspect
        # twice the limit at which the last suspect was found
        self._raised_s = dict.fromkeys(TIMED_PHASES, 0.0)
        self._steps = 0
        self._reached_step = 0
        self._calm_from: int | None = None  # step; None until the first beats came
        self._recovery_s = 0.0
        self.suspects = 0
        self._reported_limits: tuple[dict[str, int], int] = ({}, 0)

    @property
    def are_known(self) -> bool:
        """True if a process has taken enough steps to judge phases by their durations."""
        return self._steps >= KNOWN_STEPS

    @property
    def allowance_s(self) -> float:
        """The time in seconds that a phase has beyond its longest duration so far.

        It is the duration of the last recovery, and at least ``hang_floor_ms``.
        """
        return max(self._floor_s, self._recovery_s)

    def longest_s(self, phase: Phase) -> float:
        """Return the duration of the longest phase of this kind that ended by itself, on any rank.

        A phase that made its rank a suspect counts with its age.
        """
        return max(self._longest_s[phase], self._suspected_s[phase])

    def learn(self, beats: Iterable[Beat]) -> None:
        """Take in the longest phases and the steps of all ranks.

        After :data:`CALM_STEPS` without a suspect, the limits that suspects have raised are halved.
        """
        for beat in beats:
            self._steps = max(self._steps, beat.commits)
            self._reached_step = max(self._reached_step, beat.step)
            for phase, longest_ms in zip(TIMED_PHASES, beat.longest_ms, strict=False):
                self._longest_s[phase] = max(self._longest_s[phase], longest_ms / 1000)
        if self._calm_from is None:
            self._calm_from = self._reached_step
        while self._reached_step - self._calm_from >= CALM_STEPS:
            self._calm_from += CALM_STEPS
            self._raised_s = {phase: raised_s / 2 for phase, raised_s in self._raised_s.items()}

    def note_recovery(self, took_s: float) -> None:
        """Take in the duration of a recovery, from its plan to the first commit under it."""
        self._recovery_s = took_s

    def suspect(self, suspicion: Suspicion) -> None:
        """Take in that a rank was ended on suspicion, now or by an earlier coordinator.

        It may have been healthy, so the next suspect has twice the time. A suspicion in another
        phase than :data:`~chaoskit.vocabulary.TIMED_PHASES` changes nothing.
        """
        phase = suspicion.phase
        if phase not in TIMED_PHASES:
            return
        self.suspects += 1
        if self._calm_from is not None:
            self._calm_from = self._reached_step
        self._suspected_s[phase] = max(self._suspected_s[phase], suspicion.age_s)
        self._raised_s[phase] = max(self._raised_s[phase], 2 * suspicion.limit_s)

    def limit_s(self, phase: Phase, step_s: float, *, first: bool = False) -> float:
        """Return the age in seconds at which a phase is suspicious.

        It is the largest of three: ``hang_steps`` steps, the longest phase so far plus the
        allowance, and twice the limit of the last suspect. The allowance for few known steps does
        not multiply the age of a suspect: its phase might never have ended.

        Args:
            step_s: median of the recent step times in seconds; 0 while it is not known.
            first: the process has not committed a step in its generation yet.
        """
        young_factor = 1 + YOUNG_STEPS / max(self._steps, KNOWN_STEPS)
        allowance_s = self.allowance_s * (FIRST_STEP_ALLOWANCES if first else 1.0)
        longest_s = max(self._longest_s[phase] * young_factor, self._suspected_s[phase])
        learned_s = longest_s + allowance_s
        return max(self._hang_steps * step_s, learned_s, self._raised_s[phase])

    def news(self, step_s: float) -> dict[str, Any] | None:
        """Return the fields of a record ``hang_limits``; None if no limit has moved since the last.

        The record is returned also after each further suspect. None is returned before the limits
        are known.

        Args:
            step_s: median of the recent step times in seconds; 0 while it is not known.
        """
        if not self.are_known:
            return None
        limits = {phase.label: round(self.limit_s(phase, step_s) * 1000) for phase in TIMED_PHASES}
        before, suspects = self._reported_limits
        if (
            suspects == self.suspects
            and before
            and all(_is_near(limits[name], before[name]) for name in limits)
        ):
            return None
        self._reported_limits = limits, self.suspects
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
