"""The detector of hangs: a rank hangs if its phase is older than the limit of that phase.

A rank that another one waits for has the limit of its phase. While no rank waits, the limit of the
user's own code holds for every phase, and a rank hangs only if no rank makes progress.

-> coordinator/detectors/phase_limits.py: the formula of a limit; coordinator/detectors/contact.py:
a node that sends no reports. coordinator/detectors/watch.py passes the findings on to
coordinator/handlers/on_suspicion.py, which ends the rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from chaoskit.config import RunConfig
from chaoskit.coordinator.detectors.phase_limits import PhaseLimits
from chaoskit.vocabulary import TIMED_PHASES, Phase
from chaoskit.wire.messages import Beat

#: Steps from which the recent step time is taken.
WINDOW_STEPS = 32
#: Steps of a new generation after which the step time of the one before it is forgotten.
CARRY_STEPS = 4
#: Before the phases of the job are known, a phase may last this many times as long as the rehearsal
#: suggests, and at least UNKNOWN_STEP_S: the rehearsal shows the time of a step only roughly.
REHEARSAL_FACTOR = 4.0
UNKNOWN_STEP_S = 10.0
#: A job in which all ranks wait is stalled after this many limits, and at least this long.
STALL_FACTOR = 5.0
STALL_S = 2.0
#: Phases in which a rank waits until the others have reached its step.
_AWAITING = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.DONE})


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that makes no progress.

    Attributes:
        worker: the worker of the rank.
        phase: the phase in which it hangs.
        age_s: age of the phase in seconds, without the time in which the rank waited for a CPU.
        limit_s: age in seconds above which the phase is a hang.
        waited: another rank waits for it.
    """

    worker: str
    phase: Phase
    age_s: float
    limit_s: float
    waited: bool = True

    @property
    def detail(self) -> str:
        """A description of the hang for the journal and the user."""
        age_ms, limit_ms = self.age_s * 1000, self.limit_s * 1000
        why = "while others wait" if self.waited else "and no rank waits for it"
        if not self.waited and self.phase == Phase.OUTSIDE:
            why += ": declare it with trainer.long_phase, or raise outside_limit_s"
        return f"{self.phase.label} for {age_ms:.0f} ms, limit {limit_ms:.0f} ms, {why}"


@dataclass(slots=True)
class _Pace:
    """Progress of one worker in one generation."""

    generation: int
    commits: int
    committed_s: float | None = None  # the first commit seen has an unknown duration
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    median_s: float = 0.0

    def advance(self, commits: int, now_s: float) -> None:
        """Take in a number of commits that has grown, and update the median of the step times."""
        if self.committed_s is not None:
            self.durations_s.append((now_s - self.committed_s) / (commits - self.commits))
            self.median_s = median(self.durations_s)
        self.commits, self.committed_s = commits, now_s


class HangDetector:
    """Detector of ranks with a phase that lasts too long, compared with the steps so far.

    Attributes:
        limits: the limits of the phases.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.limits = PhaseLimits(config)
        self._paces: dict[str, _Pace] = {}
        self._generation = 0
        self._carried_step_s = 0.0
        self._beats: Sequence[Beat] = ()
        self._observed_s = 0.0
        self._stalls = 0  # since the last step
        self._planned_generation = 0  # the newest generation
        self._planned_s = 0.0  # when it was first seen here
        # worker, generation and phase of the only rank, while it waits for others
        self._sole_wait: tuple[str, int, Phase] | None = None
        self._sole_since_s = math.inf
        self._suspect = ""  # the last rank that was returned although no rank waited for it
        self._suspect_s = -math.inf

    @property
    def generation(self) -> int:
        """The newest generation of a beat so far; 0 before the first beat."""
        return self._generation

    @property
    def step_s(self) -> float:
        """The recent step time in seconds, of the slowest rank; 0 while it is not known."""
        slowest = max(self._paces.values(), key=lambda pace: pace.median_s, default=None)
        if slowest is None or len(slowest.durations_s) < CARRY_STEPS:
            return max(self._carried_step_s, slowest.median_s if slowest else 0.0)
        return slowest.median_s

    def interrupt(self, worker: str) -> None:
        """Discard the present step time of ``worker``, which could not report for a while."""
        if worker in self._paces:
            self._paces[worker].committed_s = None

    def observe(
        self,
        beats: Sequence[Beat],
        now_s: float,
        *,
        planned: int = 0,
        joiner_waits: bool = False,
        replacement_starts: bool = False,
        gathers: bool = False,
        incomplete: bool = False,
        world_of_one: bool = False,
    ) -> list[HungRank]:
        """Take in the latest beat of each member, and return the members to end because they hang.

        All members that hang while others wait for them are returned; otherwise at most one.

        Args:
            planned: the newest generation. Its members wait for a member of an older one.
            joiner_waits: a spare is ready to join. It waits even for the only rank of a world of
                one.
            replacement_starts: a worker was started and is not ready yet.
            gathers: a plan has just broken off a generation, and its joiners may be about to
                restore the state.
            incomplete: the beat of a member is missing.
            world_of_one: the newest plan has one member. The last member of a larger world waits
                for replacements.
        """
        self._learn(beats, now_s)
        if planned != self._planned_generation:
            self._planned_generation, self._planned_s = planned, now_s
        self._beats, self._observed_s = beats, now_s
        is_sole = (
            world_of_one and len(beats) == 1 and beats[0].generation >= planned and not incomplete
        )
        if stuck := self._stuck_alone(beats[0] if is_sole else None, now_s):
            return [stuck]
        is_alone = len(beats) == 1 and beats[0].generation >= planned and not joiner_waits
        awaited_workers = (
            () if is_alone else {beat.worker for beat in self._awaited(beats, gathers)}
        )
        waited = [
            self._hang(beat, self._limit_s(beat), now_s)
            for beat in beats
            if beat.worker in awaited_workers
        ]
        if hanging := [hang for hang in waited if hang.age_s > hang.limit_s]:
            return hanging
        rest = [] if incomplete else [beat for beat in beats if beat.worker not in awaited_workers]
        stopped_beats = [beat for beat in rest if self._has_no_progress(beat, is_alone)]
        unwaited_hangs = [
            self._hang(beat, self._abandoned_limit_s(beat, is_alone), now_s, waited=False)
            for beat in stopped_beats
        ]
        hangs = [hang for hang in unwaited_hangs if hang.age_s > hang.limit_s]
        return self._choose_suspect(hangs, gathers or replacement_starts, now_s)

    def _stuck_alone(self, sole: Beat | None, now_s: float) -> HungRank | None:
        """Return the only rank of a world if it has waited too long for others, which do not exist.

        Its phase is older if no coordinator was there to plan its next generation. So the time
        counts from the first look at it.

        Args:
            sole: the beat of the only rank; None in a larger world.
        """
        wait = (
            (sole.worker, sole.generation, Phase(sole.phase))
            if sole is not None and sole.phase in (Phase.REDUCE, Phase.REGROUP)
            else None
        )
        if wait != self._sole_wait:
            self._sole_wait, self._sole_since_s = wait, now_s
        if sole is None or wait is None:
            return None
        age_s = min(_age_s(sole), now_s - self._sole_since_s)
        limit_s = max(self._config.startup_s, self._config.collective_timeout_s)
        return (
            HungRank(sole.worker, Phase(sole.phase), age_s, limit_s, waited=False)
            if age_s > limit_s
            else None
        )

    def _choose_suspect(
        self, hangs: list[HungRank], joiner_comes: bool, now_s: float
    ) -> list[HungRank]:
        """Return at most one of the ranks that hang while no rank waits for them.

        The others still have the state. No further rank is chosen until the replacement of the last
        one has had the time to take the state over. From then on the replacement waits for the
        ranks that hang, so they are found at once. The chosen rank is returned until it is gone.

        Args:
            joiner_comes: a replacement is being started, or a generation is being formed.
        """
        if not hangs:
            return []
        if same_suspect := [hang for hang in hangs if hang.worker == self._suspect]:
            return same_suspect
        suspects = {hang.worker for hang in hangs}
        a_member_joins = any(
            beat.phase == Phase.RESTORE and beat.worker not in suspects for beat in self._beats
        )
        if (a_member_joins or joiner_comes) and now_s < self._suspect_s + self._config.startup_s:
            return []
        self._suspect, self._suspect_s = hangs[0].worker, now_s
        return hangs[:1]

    def _awaited(self, beats: Sequence[Beat], gathers: bool) -> list[Beat]:
        """Return the members that others wait for, or that are alone among members yet to join."""
        # A rank that hangs in the optimizer is waited for in the next step. A fresh joiner (step 0)
        # waits for no step.
        awaited_step = max((beat.step for beat in beats if beat.phase in _AWAITING), default=-1)
        # A rank that waits in the newest generation waits for the ranks of older ones, too.
        newest_generation = self._generation if awaited_step >= 0 else 0
        # A rank that regroups waits for all of its generation, even for a rank that is one step
        # ahead.
        left_generation = max(
            (beat.generation for beat in beats if beat.phase == Phase.REGROUP and beat.step > 0),
            default=0,
        )
        # A worker that was in no generation yet waits for one, at step 0.
        is_alone = sum(beat.generation > 0 for beat in beats) == 1 and not gathers

        def is_behind(beat: Beat) -> bool:
            return 0 < beat.generation < newest_generation or 0 < beat.generation <= left_generation

        return [beat for beat in beats if beat.step <= awaited_step or is_alone or is_behind(beat)]

    def stalled(self, now_s: float, *, formed_s: float = -math.inf) -> bool:
        """Return whether every member has waited for the others for too long.

        It judges the beats of the last :meth:`observe`. The limit doubles each time that this
        returns True without a step in between: a job that is merely slow must get to the end of its
        step.

        Args:
            formed_s: when the group of the newest generation was built. Waits before do not count.
        """
        limit_s = max(self._config.hang_floor_ms / 1000, self._config.hang_steps * self.step_s)
        patience_s = max(STALL_S, STALL_FACTOR * limit_s) * 2.0**self._stalls
        since_s = now_s - self._observed_s
        # A rank without a generation waits for a step boundary of the others, and a rank that is
        # done waits for the end of all.
        placed_beats = [
            beat for beat in self._beats if beat.generation > 0 and beat.phase != Phase.DONE
        ]
        # A rank that is stuck on its way to the newest generation shows REGROUP, and the others
        # wait for it. Ranks that are done reach no step boundary, so a rank that missed their last
        # step would wait without end.
        are_done = any(beat.phase == Phase.DONE for beat in self._beats)
        others_wait = bool(placed_beats) and (
            are_done or any(beat.phase == Phase.REDUCE for beat in placed_beats)
        )
        is_stalled = others_wait and all(
            beat.phase in (Phase.REDUCE, Phase.REGROUP)
            and min(_age_s(beat) + since_s, now_s - formed_s) > patience_s
            for beat in placed_beats
        )
        self._stalls += is_stalled
        return is_stalled

    def _learn(self, beats: Sequence[Beat], now_s: float) -> None:
        """Update the step times and the limits of the phases from the beats."""
        self.limits.learn(beats)
        generation = max((beat.generation for beat in beats), default=self._generation)
        if generation > self._generation:
            self._generation, self._carried_step_s = generation, self.step_s
            self._paces = {
                beat.worker: self._paces[beat.worker]
                for beat in beats
                if beat.worker in self._paces
            }
        for beat in beats:
            pace = self._paces.get(beat.worker)
            if pace is None or pace.generation != beat.generation:
                pace = self._paces[beat.worker] = _Pace(beat.generation, beat.commits)
            if beat.commits > pace.commits:
                pace.advance(beat.commits, now_s)
                self._stalls = 0

    def _hang(self, beat: Beat, limit_s: float, now_s: float, *, waited: bool = True) -> HungRank:
        """Return the rank of ``beat`` as a candidate, with the age and the limit of its phase."""
        age_s = (
            min(_age_s(beat), now_s - self._planned_s) if self._is_abandoned(beat) else _age_s(beat)
        )
        return HungRank(beat.worker, Phase(beat.phase), age_s, limit_s, waited)

    def _is_abandoned(self, beat: Beat) -> bool:
        """Return whether the rank of ``beat`` restores a state for a generation that is over."""
        return beat.phase == Phase.RESTORE and 0 < beat.generation < self._planned_generation

    def _has_no_progress(self, suspect: Beat, is_alone: bool) -> bool:
        """Return whether no member makes progress by itself: all wait, or hang.

        Members in the user's code of a newer generation do not count: in a sharded job, that code
        builds groups, and waits there for ``suspect``.
        """
        rest = [
            beat
            for beat in self._beats
            if beat.phase != Phase.OUTSIDE or beat.generation <= suspect.generation
        ]
        return all(self._is_stopped(beat, is_alone) for beat in rest)

    def _is_stopped(self, beat: Beat, is_alone: bool) -> bool:
        """Return whether the rank of ``beat`` waits for others, or its phase is over its limit."""
        if beat.phase in _AWAITING:
            return True
        is_joining = beat.phase in (Phase.START, Phase.RESTORE)
        return _age_s(beat) > (
            self._config.startup_s if is_joining else self._unwaited_limit_s(beat, is_alone)
        )

    def _abandoned_limit_s(self, beat: Beat, is_alone: bool) -> float:
        """Return the age at which a phase is a hang while no rank waits for it or makes progress.

        A rank that restores a state waits for its source. Once a newer plan has broken the restore
        off, no source is left to wait for: the rank has ``startup_s`` from that plan on.
        """
        return (
            self._config.startup_s
            if self._is_abandoned(beat)
            else self._unwaited_limit_s(beat, is_alone)
        )

    def _unwaited_limit_s(self, beat: Beat, is_alone: bool) -> float:
        """Return the age at which the phase of a rank is a hang while no rank waits for it.

        Patience costs nothing while no rank waits, so a phase of the step has the limit of the
        user's own code. The only rank of a job has at least ``collective_timeout_s``. The limit is
        infinite for a restore, which may wait for its source, except of the only rank.
        """
        limit_s = self._limit_s(beat)
        if is_alone and beat.phase != Phase.LONG:
            limit_s = max(limit_s, self._config.collective_timeout_s)
        if beat.phase in TIMED_PHASES:
            return max(limit_s, self._config.outside_limit_s)
        if beat.phase == Phase.RESTORE and not is_alone:
            return math.inf
        if beat.phase == Phase.OUTSIDE and beat.trained_in != beat.generation:
            return max(limit_s, self._config.startup_s)  # it may build its model again
        return limit_s

    def _limit_s(self, beat: Beat) -> float:
        """Return the age at which the phase of ``beat`` is a hang; infinite if it never is."""
        if beat.phase == Phase.LONG:
            return self._config.long_limit_s or math.inf
        if self.limits.are_known and beat.phase == Phase.OUTSIDE:
            return self._config.outside_limit_s
        if self.limits.are_known and beat.phase in TIMED_PHASES:
            return self.limits.limit_s(
                Phase(beat.phase), self.step_s, first=beat.trained_in != beat.generation
            )
        if beat.phase == Phase.RESTORE:
            return self._config.startup_s  # a state may be large
        if beat.phase == Phase.OUTSIDE:  # a sharded job builds its model here, in every generation
            return max(self._config.startup_s, self._config.outside_limit_s)
        return self._first_limit_s(beat) if beat.phase in TIMED_PHASES else math.inf

    def _first_limit_s(self, beat: Beat) -> float:
        """Return the limit of a phase of the first steps, before the phases of the job are known.

        The steps were rehearsed, so lazy compilation and loading is over.
        """
        if not beat.rehearsal_ms:
            return self._config.startup_s
        rehearsed_s = self._config.hang_steps * beat.rehearsal_ms / 1000
        return min(self._config.startup_s, max(UNKNOWN_STEP_S, REHEARSAL_FACTOR * rehearsed_s))


def _age_s(beat: Beat) -> float:
    return (beat.age_ms - beat.starved_ms) / 1000
