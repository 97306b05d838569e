"""Decisions of a worker on the generations of its world.

They are: which generation it begins, and what it needs to train in it.

Pure: without threads, sockets or a clock.

-> group/regroup.py carries the decisions out; the simulated workers of the tests do so as well.
coordinator/membership/next_world.py chooses the members; wire/messages/worlds.py has the plan.
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
#: The loss of a rank leads to a plan much sooner. Equal to ``Limits.healing_s`` of the coordinator.
_HEALING_S = 2.0
#: Generations in a row in which a rank with a state asks for another plan before it gives up.
_APPEALS_MAX = 3
#: A plan explains a broken collective much sooner; without a coordinator it may take this long.
ENTRY_S = 10.0


@dataclass(frozen=True, slots=True)
class MemberProgress:
    """The progress of a member when the generation was formed.

    Attributes:
        step: committed steps, -1 without a state.
        done: True if its training is over.
        calls: results of collectives since that commit that it has, whether user code has got them
            or not.
        digest: the digest of these results; see :meth:`CollectiveLog.digest`.
        closed: True if it makes no more calls since that commit.
    """

    rank: int
    step: int
    done: bool
    calls: int = 0
    digest: int = 0
    closed: bool = False

    def encode(self) -> bytes:
        """Return the progress in bytes, without the rank."""
        return _STANDING.pack(self.step, self.done, self.calls, self.digest, self.closed)

    @classmethod
    def decode(cls, rank: int, data: bytes) -> MemberProgress:
        return cls(rank, *_STANDING.unpack(data))


class FirstMove(Enum):
    """The first action of a rank in a generation."""

    HEAL = auto()  # take the state from a source
    END = auto()  # the other ranks have taken the last step
    FAIL = auto()  # no member has the state
    TRAIN = auto()


@dataclass(eq=False, slots=True)
class Generation:
    """A membership in which a worker trains.

    Attributes:
        me: the place of this worker; in a membership without it, its former place.
        standings: progress of each member, by rank; empty until the members have exchanged it.
        broken: its group can carry no step any more.
        results: results of collectives from :attr:`holder`; None until they have arrived.
    """

    plan: Plan
    me: Member
    standings: tuple[MemberProgress, ...] = ()
    broken: bool = False
    results: tuple[bytes, ...] | None = None

    @property
    def target(self) -> MemberProgress:
        """The member that is furthest ahead.

        All others must reach its step. Among members with that step, one that is done comes first.

        Raises:
            ValueError: if the members have not exchanged their progress.
        """
        return max(self.standings, key=lambda standing: (standing.step, standing.done))

    @property
    def goal_step(self) -> int:
        """The step that every member must have.

        It is that of the furthest member, or of the newest copy if no member has that step.

        Raises:
            ValueError: as :attr:`target`.
        """
        return max(self.target.step, *(snapshot.step for snapshot in self.plan.restore), -1)

    @property
    def holder(self) -> MemberProgress | None:
        """The member from which others take over results of collectives, or None.

        It has the most results at :attr:`goal_step`. Members that lack none compare their results
        with it. None if no member has a result, or all members have the same ones.

        Raises:
            ValueError: as :attr:`target`.
        """
        furthest = [standing for standing in self.standings if standing.step == self.goal_step]
        holder = max(furthest, key=lambda standing: standing.calls, default=None)
        if holder is None or not holder.calls:
            return None
        holder_log = (holder.step, holder.calls, holder.digest)
        are_equal = all(
            (standing.step, standing.calls, standing.digest) == holder_log
            for standing in self.standings
        )
        return None if are_equal else holder

    def gone_on(self, step: int) -> MemberProgress | None:
        """Return a member that will make no more calls since the commit of ``step``, or None.

        It has entered the next step, or finished, before this generation was formed.
        """
        past_members = (
            member
            for member in self.standings
            if member.step == step and (member.closed or member.done)
        )
        return next(past_members, None)

    def learn(self, encoded: Sequence[bytes]) -> None:
        """Set the progress of all members.

        Args:
            encoded: the encoded progress of each member, by rank.
        """
        self.standings = tuple(
            MemberProgress.decode(rank, data) for rank, data in enumerate(encoded)
        )

    def first_move(self, step: int) -> FirstMove:
        """Return the first action of a member that has ``step``; -1 means without a state.

        Raises:
            ValueError: as :attr:`target`.
        """
        if self.goal_step > step:
            return FirstMove.HEAL
        if self.target.done:
            return FirstMove.END
        return FirstMove.TRAIN if step >= 0 else FirstMove.FAIL


#: The type of a generation: real and simulated workers extend it differently.
AnyGeneration = TypeVar("AnyGeneration", bound=Generation)


@dataclass(frozen=True, slots=True)
class GenerationChange(Generic[AnyGeneration]):
    """A change from one generation to the next.

    Attributes:
        previous: the generation that ends.
        begun: the generation that takes its place.
        takes_part: False for a worker that departs; it forms no group.
    """

    previous: AnyGeneration | None
    begun: AnyGeneration
    takes_part: bool


class GenerationCourse(Generic[AnyGeneration]):
    """The generations of one worker: the current one, and the plan that waits for a step boundary.

    Args:
        worker: the name of the worker.
        make: makes a new generation from a plan and the place of this worker in it.

    Attributes:
        current: the newest generation that was begun.
        step: committed steps of this worker, -1 without a state.
        done: True if its training is over.
        calls: its collectives since the last commit. Results are added in a step change only.
    """

    def __init__(self, worker: str, make: Callable[[Plan, Member], AnyGeneration]) -> None:
        self._worker, self._make = worker, make
        self.calls = CollectiveLog()
        self.current: AnyGeneration | None = None
        self._waiting: Plan | None = None  # the newest plan that waits for a step boundary
        self._advancing = False  # True while the step changes
        self.step = 0
        self.done = False

    # -- plans -------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> GenerationChange[AnyGeneration] | None:
        """Take in a plan, and return the change that it causes now, or None.

        The first plan and a plan that aborts are begun at once, and so is any plan if the current
        generation is broken. Of other plans, the newest waits for the next step boundary. A plan
        that is not newer than the current generation is ignored.

        Raises:
            ValueError: if the first plan has no place for this worker.
        """
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
        """The generation of the plan that waits for a step boundary, or else of the current one.

        0 before the first plan.
        """
        newest = self._waiting or (self.current.plan if self.current is not None else None)
        return newest.generation if newest is not None else 0

    def move_on(self, lowest_vote: int) -> GenerationChange[AnyGeneration] | None:
        """Begin the waiting plan at a step boundary of all ranks, if all of them have it.

        Return the change, or None if no plan is begun.

        Args:
            lowest_vote: the lowest :attr:`vote` of all ranks.
        """
        if self._waiting is None or self._waiting.generation > lowest_vote:
            return None
        return self._begin(self._waiting)

    def give_up(self, generation: AnyGeneration) -> GenerationChange[AnyGeneration] | None:
        """Mark ``generation`` as broken, and return the change that follows, or None.

        It has no more step boundaries, so a waiting plan is begun at once.
        """
        generation.broken = True
        if self._waiting is None or self.current is not generation:
            return None
        return self._begin(self._waiting)

    def _begin(self, plan: Plan) -> GenerationChange[AnyGeneration]:
        """Make the generation of ``plan`` the current one, and return the change.

        Raises:
            ValueError: if the first plan has no place for this worker.
        """
        me, previous = plan.member(self._worker), self.current
        own_member = me or (previous.me if previous is not None else None)
        if own_member is None:
            raise ValueError(f"generation {plan.generation} has no place for {self._worker}")
        if previous is not None:
            previous.broken = True
        self.current, self._waiting = self._make(plan, own_member), None
        return GenerationChange(previous, self.current, me is not None)

    # -- the current generation --------------------------------------------------------------------

    @property
    def met(self) -> AnyGeneration | None:
        """The newest generation, or None until its members have exchanged their progress."""
        current = self.current
        return current if current is not None and current.standings else None

    @property
    def departing(self) -> AnyGeneration | None:
        """The newest generation if this worker departs with it, else None.

        The worker then waits for its end, or for a newer generation that contains it.
        """
        current = self.current
        return current if current is not None and self._worker in current.plan.leavers else None

    @property
    def departure(self) -> Plan | None:
        """The newest plan, begun or waiting, if this worker departs with it, else None.

        Its members do not wait for this worker.
        """
        newest = self._waiting or (self.current.plan if self.current is not None else None)
        return newest if newest is not None and self._worker in newest.leavers else None

    def is_over(self, generation: AnyGeneration) -> bool:
        """Return whether ``generation`` broke, or a newer one was begun."""
        return generation.broken or self.current is not generation

    # -- the step that is reported to others -------------------------------------------------------

    def begin_step_change(self, generation: AnyGeneration) -> bool:
        """Withhold the progress from newer generations while the step changes.

        Return False if ``generation`` is over already. The step must not change then.
        """
        if self.is_over(generation):
            return False
        self._advancing = True
        return True

    def end_step_change(self) -> None:
        """Allow the progress to be reported again, after :meth:`begin_step_change`."""
        self._advancing = False

    def may_report(self, generation: AnyGeneration) -> bool:
        """Return whether :meth:`progress_for` can be called.

        The progress is then settled, or ``generation`` is broken and gets none.
        """
        return not self._advancing or generation.broken

    def progress_for(self, generation: AnyGeneration) -> MemberProgress | None:
        """Return the progress to report to the members of ``generation``; None if it is broken."""
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


# -- limits ----------------------------------------------------------------------------------------


def healing_limit_s(generation: Generation) -> float | None:
    """Return the seconds that a rank without a source waits for a newer generation; None: no limit.

    A generation that broke without a coordinator is followed by a newer one once there is a
    coordinator.
    """
    return None if generation.broken else _HEALING_S


def may_appeal(step: int, failures: int) -> bool:
    """Return whether a rank without a source waits for another plan instead of failing.

    It waits, for any time, if it has a state of its own. That may be the last state if the members
    ahead are lost, and a new process would have none. Without a coordinator, or if the world needs
    a replacement first, no plan follows in time.

    Args:
        step: the step of its state, -1 for none.
        failures: generations in a row, with this one, in which no source has provided the state.
    """
    return step >= 0 and failures <= _APPEALS_MAX


def entry_limit_s(is_explained: bool, config: RunConfig) -> float | None:
    """Return the seconds that a rank waits for the next plan if its entry failed; None: no limit.

    That plan may wait for a replacement, which has to start.

    Args:
        is_explained: the failure follows from the end of the generation or of the lease, and is not
            this rank's own.
    """
    return None if is_explained else ENTRY_S + max(config.replacement_s, config.startup_s)
