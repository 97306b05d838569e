"""What a worker decides about the generations of its world: which it begins, and what it needs to train in one.

Without threads, sockets or a clock: :class:`chaoskit.runtime.group.regroup.Regrouper` carries the decisions out, and
the simulated workers of the tests do so, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from chaoskit.config import RunConfig
from chaoskit.runtime.group.collective_log import CollectiveLog
from chaoskit.wire.messages import Member, Plan

_STANDING = struct.Struct("!q?QQ?")
#: The loss of a rank leads to a plan much sooner. The same as ``Limits.healing_s`` of the coordinator.
_HEALING_S = 2.0
#: Generations in a row in which a rank that has a state asks for another plan, before it gives itself up.
_APPEALS_MAX = 3
#: A broken collective is explained by a plan much sooner; without a coordinator it may take this long.
ENTRY_S = 10.0


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """Where a member was when the generation was formed: steps committed, and whether its training is over.

    Attributes:
        calls: results of collectives since that commit that it has, in user code or before it.
        digest: of these; see :meth:`CollectiveLog.digest`.
        closed: it makes no more calls since that commit.
    """

    rank: int
    step: int
    done: bool
    calls: int = 0
    digest: int = 0
    closed: bool = False

    def encode(self) -> bytes:
        return _STANDING.pack(self.step, self.done, self.calls, self.digest, self.closed)

    @classmethod
    def decode(cls, rank: int, value: bytes) -> MemberProgress:
        return cls(rank, *_STANDING.unpack(value))


class FirstMove(Enum):
    """What a rank does first in a generation."""

    HEAL = auto()  # take the state from a source that has it
    END = auto()  # the others have taken the last step
    FAIL = auto()  # no member has the state
    TRAIN = auto()


@dataclass(eq=False, slots=True)
class Generation:
    """A membership in which a worker trains.

    Attributes:
        me: the place of this worker; in a membership without it, the one that it had before.
        standings: progress of each member, by rank; None until the members have exchanged it.
        broken: its group can carry no step any more.
        results: of collectives, from :attr:`holder`; None until they are there.
    """

    plan: Plan
    me: Member
    standings: tuple[MemberProgress, ...] | None = None
    broken: bool = False
    results: tuple[bytes, ...] | None = None

    @property
    def target(self) -> MemberProgress:
        """The furthest member: all others must have its step, and it is at its end if one that has the step is."""
        assert self.standings is not None
        return max(self.standings, key=lambda standing: (standing.step, standing.done))

    @property
    def goal_step(self) -> int:
        """The step that every member must have: of the furthest one, or of the newest copy where no member has it."""
        return max(self.target.step, *(snapshot.step for snapshot in self.plan.restore), -1)

    @property
    def holder(self) -> MemberProgress | None:
        """The member from which all others take over results of collectives; None where none lacks any.

        It has most of them. Members that lack none compare theirs with its own.
        """
        assert self.standings is not None
        ahead = [standing for standing in self.standings if standing.step == self.goal_step]
        holder = max(ahead, key=lambda standing: standing.calls, default=None)
        if holder is None or not holder.calls:
            return None
        log = (holder.step, holder.calls, holder.digest)
        same = all(
            (standing.step, standing.calls, standing.digest) == log for standing in self.standings
        )
        return None if same else holder

    def gone_on(self, step: int) -> MemberProgress | None:
        """A member that made its last call since the commit of ``step`` before this generation was formed, if any."""
        ended = (
            one for one in self.standings or () if one.step == step and (one.closed or one.done)
        )
        return next(ended, None)

    def learn(self, values: Sequence[bytes]) -> None:
        """Take note of what the members say of themselves, by rank: encoded standings."""
        self.standings = tuple(
            MemberProgress.decode(rank, value) for rank, value in enumerate(values)
        )

    def first_move(self, step: int) -> FirstMove:
        """What a member that has ``step`` does; -1 for one without a state."""
        if self.goal_step > step:
            return FirstMove.HEAL
        if self.target.done:
            return FirstMove.END
        return FirstMove.TRAIN if step >= 0 else FirstMove.FAIL


#: What else belongs to a generation differs between a real worker and a simulated one.
AnyGeneration = TypeVar("AnyGeneration", bound=Generation)


@dataclass(frozen=True, slots=True)
class GenerationChange(Generic[AnyGeneration]):
    """The step from one generation to the next.

    Attributes:
        previous: the generation that it breaks.
        begun: the generation that takes its place.
        takes_part: false for a worker that departs; it forms no group.
    """

    previous: AnyGeneration | None
    begun: AnyGeneration
    takes_part: bool


class GenerationCourse(Generic[AnyGeneration]):
    """The generations of one worker: the current one, and the plan that waits for a step boundary.

    Args:
        worker: its name.
        make: a new generation, from a plan and the place of this worker in it.

    Attributes:
        current: the newest generation that was begun.
        step: committed steps of this worker, -1 without a state.
        done: whether its training is over.
        calls: its collectives since the last commit. Results are added in a step change only.
    """

    def __init__(self, worker: str, make: Callable[[Plan, Member], AnyGeneration]) -> None:
        self._worker, self._make = worker, make
        self.calls = CollectiveLog()
        self.current: AnyGeneration | None = None
        self._waiting: Plan | None = None  # the newest plan that waits for a step boundary
        self._advancing = False  # the step is just changing
        self.step = 0
        self.done = False

    # -- plans --------------------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> GenerationChange[AnyGeneration] | None:
        """Take note of a plan. One that aborts is begun at once, another one at the next step boundary."""
        current = self.current
        if current is not None and plan.generation <= current.plan.generation:
            return None
        if plan.abort or current is None or current.broken:
            return self._begin(plan)
        if self._waiting is None or plan.generation > self._waiting.generation:
            self._waiting = plan
        return None

    @property
    def vote(self) -> int:
        """Generation of the plan that waits for a step boundary, or of the current one."""
        newest = self._waiting or (self.current.plan if self.current is not None else None)
        return newest.generation if newest is not None else 0

    def move_on(self, lowest_vote: int) -> GenerationChange[AnyGeneration] | None:
        """At a step boundary that all ranks share: begin the waiting plan, if all of them know it."""
        if self._waiting is None or self._waiting.generation > lowest_vote:
            return None
        return self._begin(self._waiting)

    def give_up(self, generation: AnyGeneration) -> GenerationChange[AnyGeneration] | None:
        """There will be no step boundary in ``generation`` any more: a waiting plan is begun at once."""
        generation.broken = True
        if self._waiting is None or self.current is not generation:
            return None
        return self._begin(self._waiting)

    def _begin(self, plan: Plan) -> GenerationChange[AnyGeneration]:
        me, previous = plan.member(self._worker), self.current
        place = me or (previous.me if previous is not None else None)
        assert place is not None, "a plan without this worker ends it before it comes here"
        if previous is not None:
            previous.broken = True
        self.current, self._waiting = self._make(plan, place), None
        return GenerationChange(previous, self.current, me is not None)

    # -- the current generation ---------------------------------------------------------------------------------

    @property
    def known(self) -> AnyGeneration | None:
        """The newest generation, if the steps of its members are known."""
        current = self.current
        return current if current is not None and current.standings is not None else None

    @property
    def departing(self) -> AnyGeneration | None:
        """The newest generation, if this worker departs: it waits for its end, or for a newer generation with it."""
        current = self.current
        return current if current is not None and self._worker in current.plan.leavers else None

    @property
    def farewell(self) -> Plan | None:
        """The newest plan, begun or waiting, if this worker departs with it. Its members do not wait for it."""
        newest = self._waiting or (self.current.plan if self.current is not None else None)
        return newest if newest is not None and self._worker in newest.leavers else None

    def is_over(self, generation: AnyGeneration) -> bool:
        """Whether it broke, or there is a newer one."""
        return generation.broken or self.current is not generation

    # -- the step that others are told --------------------------------------------------------------------------

    def begin_step_change(self, generation: AnyGeneration) -> bool:
        """Hold back the progress for newer generations, as the step is going to change.

        Return False if ``generation`` is over already: then the step must not change.
        """
        if self.is_over(generation):
            return False
        self._advancing = True
        return True

    def end_step_change(self) -> None:
        """Let the progress be told again."""
        self._advancing = False

    def may_report(self, generation: AnyGeneration) -> bool:
        """Whether :meth:`progress_for` can be called."""
        return not self._advancing or generation.broken

    def progress_for(self, generation: AnyGeneration) -> MemberProgress | None:
        """What the members of ``generation`` are told of this worker; None if they need not be told any more."""
        if generation.broken:
            return None
        calls, step = self.calls, self.step
        return MemberProgress(
            generation.me.rank,
            step,
            self.done,
            calls=len(calls.results(step)),
            digest=calls.digest(step),
            closed=calls.is_closed(step),
        )


# -- limits -----------------------------------------------------------------------------------------------------------


def healing_limit_s(generation: Generation) -> float | None:
    """Return how long a rank that found no source of the state waits for a newer generation; None for any time.

    A generation that broke without a coordinator has a newer one as soon as there is a coordinator again.
    """
    return None if generation.broken else _HEALING_S


def may_appeal(step: int, failures: int) -> bool:
    """Return whether a rank that found no source of the state waits for another plan, for any time, instead of failing.

    It does where it has a state of its own: that may be the last one, if the members ahead are lost, and a new process
    would have none. Without a coordinator, or where the world needs a replacement first, no plan follows in time.

    Args:
        step: that it has, -1 for none.
        failures: generations in a row in which no source has given it the state, with this one.
    """
    return step >= 0 and failures <= _APPEALS_MAX


def entry_limit_s(explained: bool, config: RunConfig) -> float | None:
    """Return how long a rank whose entry into a sharded job failed waits for the next plan; None for any time.

    That plan may wait for a replacement, which has to start.

    Args:
        explained: by the end of the generation or of the lease: then the failure is not this rank's own.
    """
    return None if explained else ENTRY_S + max(config.replacement_s, config.startup_s)
