"""Finds ranks that hang: the phase of such a rank is older than its limit.

A rank that another one waits for has the limit of its phase. While no rank waits, the limit of the
user's own code holds for every phase, and a rank hangs only if all ranks stand still.
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
#: Before the phases of the job are known, one has so many times longer than the rehearsal suggests, and at least this
#: long: the rehearsal tells the time of a step only roughly.
REHEARSAL_FACTOR = 4.0
UNKNOWN_STEP_S = 10.0
#: A job in which everybody waits is stalled after this many limits, and at least this long.
STALL_FACTOR = 5.0
STALL_S = 2.0
#: Phases in which a rank cannot go on before the others have reached its step.
_AWAITING = frozenset({Phase.REDUCE, Phase.REGROUP, Phase.DONE})


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank that does not go on. ``age_s`` leaves out the time during which it waited for a CPU.

    Attributes:
        waited: another rank waits for it.
    """

    worker: str
    phase: Phase
    age_s: float
    limit_s: float
    waited: bool = True

    @property
    def detail(self) -> str:
        """A sentence for people."""
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
        """Take in a number of commits that has grown."""
        if self.committed_s is not None:
            self.durations_s.append((now_s - self.committed_s) / (commits - self.commits))
            self.median_s = median(self.durations_s)
        self.commits, self.committed_s = commits, now_s


class HangDetector:
    """Learns how long steps and their phases take, and blames the rank whose phase lasts too long.

    Attributes:
        limits: of the phases.
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
        self._planned, self._planned_s = (
            0,
            0.0,
        )  # the newest generation, and when it was first seen here
        self._sole: tuple[str, int, Phase] | None = None  # the only rank, while it waits for others
        self._sole_since_s = math.inf
        self._ended = ""  # the last rank that was found without a waiting one
        self._ended_s = -math.inf

    @property
    def generation(self) -> int:
        """The newest generation that a beat came from: what :meth:`stalled` is about."""
        return self._generation

    @property
    def step_s(self) -> float:
        """The recent step time; 0 while it is not known."""
        slowest = max(self._paces.values(), key=lambda pace: pace.median_s, default=None)
        if slowest is None or len(slowest.durations_s) < CARRY_STEPS:
            return max(self._carried_step_s, slowest.median_s if slowest else 0.0)
        return slowest.median_s

    def interrupt(self, worker: str) -> None:
        """``worker`` could not be heard: the time until its next commit is no step time."""
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
    ) -> list[Hang]:
        """Return the members that hang and are to be ended now, given the latest beat of every current member.

        Args:
            planned: the newest generation. A member of an older one is waited for.
            joiner_waits: a spare is ready to join, and waits even for the only rank of a world of one.
            replacement_starts: a worker was started and is not ready yet.
            gathers: a plan has just broken off a generation, and its joiners may be about to take the state over.
            incomplete: there is no beat of some member yet.
            world_of_one: the newest plan has one member. The last member of a larger world waits for replacements.
        """
        self._learn(beats, now_s)
        if planned != self._planned:
            self._planned, self._planned_s = planned, now_s
        self._beats, self._observed_s = beats, now_s
        is_sole = (
            world_of_one and len(beats) == 1 and beats[0].generation >= planned and not incomplete
        )
        if stuck := self._stuck_alone(beats[0] if is_sole else None, now_s):
            return [stuck]
        is_alone = len(beats) == 1 and beats[0].generation >= planned and not joiner_waits
        awaited = () if is_alone else {beat.worker for beat in self._awaited(beats, gathers)}
        waited = [
            self._hang(beat, self._limit_s(beat), now_s) for beat in beats if beat.worker in awaited
        ]
        if found := [hang for hang in waited if hang.age_s > hang.limit_s]:
            return found
        rest = [] if incomplete else [beat for beat in beats if beat.worker not in awaited]
        still = [beat for beat in rest if self._all_stand_still(beat, is_alone)]
        unwaited = [
            self._hang(beat, self._abandoned_limit_s(beat, is_alone), now_s, waited=False)
            for beat in still
        ]
        hangs = [hang for hang in unwaited if hang.age_s > hang.limit_s]
        return self._one_of(hangs, gathers or replacement_starts, now_s)

    def _stuck_alone(self, sole: Beat | None, now_s: float) -> Hang | None:
        """Return the only rank of a world if it has waited too long for others: there are none.

        Its phase is older where no coordinator was there to plan its next generation, so the time counts from the
        first look at it.
        """
        waits = sole is not None and sole.phase in (Phase.REDUCE, Phase.REGROUP)
        place = (
            (sole.worker, sole.generation, Phase(sole.phase))
            if sole is not None and waits
            else None
        )
        if place != self._sole:
            self._sole, self._sole_since_s = place, now_s
        if sole is None or place is None:
            return None
        age_s = min(_age_s(sole), now_s - self._sole_since_s)
        limit_s = max(self._config.startup_s, self._config.collective_timeout_s)
        return (
            Hang(sole.worker, Phase(sole.phase), age_s, limit_s, waited=False)
            if age_s > limit_s
            else None
        )

    def _one_of(self, hangs: list[Hang], joiner_comes: bool, now_s: float) -> list[Hang]:
        """Choose one of the ranks that hang without a waiting one.

        The others still have the state. So no other one is chosen before the replacement of the last one has had the
        time to take it over; then that rank waits for those that hang, and they are found at once.
        """
        if not hangs:
            return []
        if again := [hang for hang in hangs if hang.worker == self._ended]:
            return again
        suspects = {hang.worker for hang in hangs}
        joins = any(
            beat.phase == Phase.RESTORE and beat.worker not in suspects for beat in self._beats
        )
        if (joins or joiner_comes) and now_s < self._ended_s + self._config.startup_s:
            return []
        self._ended, self._ended_s = hangs[0].worker, now_s
        return hangs[:1]

    def _awaited(self, beats: Sequence[Beat], gathers: bool) -> list[Beat]:
        """The members that another one waits for, or that are alone among members which have yet to join."""
        # A rank that hangs in the optimizer is waited for in the next step; a fresh joiner (step 0) waits for no step.
        reached = max((beat.step for beat in beats if beat.phase in _AWAITING), default=-1)
        # One that waits in the newest generation waits for those of older ones, too.
        newest = self._generation if reached >= 0 else 0
        # A rank that regroups waits for all of its generation, also for one that has taken a step more.
        left = max(
            (beat.generation for beat in beats if beat.phase == Phase.REGROUP and beat.step > 0),
            default=0,
        )
        # A worker that was in no generation yet waits for one, at step 0.
        is_alone = sum(beat.generation > 0 for beat in beats) == 1 and not gathers

        def is_behind(beat: Beat) -> bool:
            return 0 < beat.generation < newest or 0 < beat.generation <= left

        return [beat for beat in beats if beat.step <= reached or is_alone or is_behind(beat)]

    def stalled(self, now_s: float, *, formed_s: float = -math.inf) -> bool:
        """Return whether every member has waited for the others for so long that no end is to be expected.

        Every time that it is so without a step in between, the next needs twice the patience: what is merely slow must
        come to its end.

        Args:
            formed_s: when the group of the newest generation was built. Its members may have waited for that, too.
        """
        limit_s = max(self._config.hang_floor_ms / 1000, self._config.hang_steps * self.step_s)
        patience_s = max(STALL_S, STALL_FACTOR * limit_s) * 2.0**self._stalls
        since_s = now_s - self._observed_s
        # A rank without a generation waits for a step boundary of the others, a rank that is done for the end of all.
        placed = [beat for beat in self._beats if beat.generation > 0 and beat.phase != Phase.DONE]
        # One that is stuck on its way to the newest generation shows REGROUP, and the others wait for it. Ranks that
        # are done reach no step boundary, so a rank that missed their last step would wait there for ever.
        are_done = any(beat.phase == Phase.DONE for beat in self._beats)
        others_wait = bool(placed) and (
            are_done or any(beat.phase == Phase.REDUCE for beat in placed)
        )
        stalled = others_wait and all(
            beat.phase in (Phase.REDUCE, Phase.REGROUP)
            and min(_age_s(beat) + since_s, now_s - formed_s) > patience_s
            for beat in placed
        )
        self._stalls += stalled
        return stalled

    def _learn(self, beats: Sequence[Beat], now_s: float) -> None:
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

    def _hang(self, beat: Beat, limit_s: float, now_s: float, *, waited: bool = True) -> Hang:
        age_s = (
            min(_age_s(beat), now_s - self._planned_s) if self._is_abandoned(beat) else _age_s(beat)
        )
        return Hang(beat.worker, Phase(beat.phase), age_s, limit_s, waited)

    def _is_abandoned(self, beat: Beat) -> bool:
        """Return whether the rank of ``beat`` restores a state in a generation that a newer plan has broken off."""
        return beat.phase == Phase.RESTORE and 0 < beat.generation < self._planned

    def _all_stand_still(self, suspect: Beat, is_alone: bool) -> bool:
        """Return whether no member makes progress, as far as it does not need the rank of ``suspect`` for that."""
        # The user's code of a sharded job builds the groups of a new generation, and waits there for all members.
        rest = [
            beat
            for beat in self._beats
            if beat.phase != Phase.OUTSIDE or beat.generation <= suspect.generation
        ]
        return all(self._stands_still(beat, is_alone) for beat in rest)

    def _stands_still(self, beat: Beat, is_alone: bool) -> bool:
        """Return whether the rank of ``beat`` waits for other ranks, or does not go on by itself."""
        if beat.phase in _AWAITING:
            return True
        is_joining = beat.phase in (Phase.START, Phase.RESTORE)
        return _age_s(beat) > (
            self._config.startup_s if is_joining else self._unwaited_limit_s(beat, is_alone)
        )

    def _abandoned_limit_s(self, beat: Beat, is_alone: bool) -> float:
        """Age at which a phase is a hang while no rank waits for it and no other rank goes on.

        A rank that restores a state waits for its source, but once a newer plan has broken the restore off no source
        is left to wait for. It has ``startup_s`` from that plan on.
        """
        return (
            self._config.startup_s
            if self._is_abandoned(beat)
            else self._unwaited_limit_s(beat, is_alone)
        )

    def _unwaited_limit_s(self, beat: Beat, is_alone: bool) -> float:
        """Age at which the phase of a rank that no rank waits for is a hang.

        Nothing is lost by patience while no rank waits, so a phase of the step has the limit of the user's own code.
        The only rank of a job has the last resort of collectives at least.
        """
        limit_s = self._limit_s(beat)
        if is_alone and beat.phase != Phase.LONG:
            limit_s = max(limit_s, self._config.collective_timeout_s)
        if beat.phase in TIMED_PHASES:
            return max(limit_s, self._config.outside_limit_s)
        if beat.phase == Phase.RESTORE and not is_alone:
            return math.inf
        if (
            beat.phase == Phase.OUTSIDE and beat.trained_in != beat.generation
        ):  # it may build its model again
            return max(limit_s, self._config.startup_s)
        return limit_s

    def _limit_s(self, beat: Beat) -> float:
        """Age at which the phase that ``beat`` reports is a hang; infinite where a rank cannot be blamed."""
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
        """For a phase of the first steps. They were rehearsed, so what is compiled or loaded late has been."""
        if not beat.rehearsal_ms:
            return self._config.startup_s
        rehearsed_s = self._config.hang_steps * beat.rehearsal_ms / 1000
        return min(self._config.startup_s, max(UNKNOWN_STEP_S, REHEARSAL_FACTOR * rehearsed_s))


def _age_s(beat: Beat) -> float:
    return (beat.age_ms - beat.starved_ms) / 1000
