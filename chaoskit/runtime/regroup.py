"""How a worker moves from one generation to the next, while its main thread may still be computing.

The control thread offers plans; each plan is formed in a thread of its own, so that a newer plan never waits for an
older one that hangs in a half-built group. The main thread meets the result when it needs it: first the steps that
every member has committed (to see who must catch up), then the group.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaoskit.errors import ChaoskitError
from chaoskit.journal import Journal
from chaoskit.messages import STANDING, Member, Plan
from chaoskit.runtime.group import Group
from chaoskit.runtime.rendezvous import GenerationSuperseded, Rendezvous
from chaoskit.vocabulary import Event

_STANDING = struct.Struct("!q?")


class Dismissed(BaseException):
    """The others go on without this worker, which is to end; leaves the user's code past its ``except Exception``."""

    def __init__(self, grace_s: float, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._until_s = time.monotonic() + grace_s

    @property
    def seconds_left(self) -> float:
        """Until this process is ended, whatever it does."""
        return max(0.0, self._until_s - time.monotonic())


@dataclass(slots=True)
class Formation:
    """A membership as this worker lives it. ``standings`` and ``group`` are None until they are known.

    ``me``: of one that this worker has left, its place in the membership before.
    """

    plan: Plan
    me: Member
    standings: tuple[Standing, ...] | None = None
    group: Group | None = None
    broken: bool = False
    rendezvous: Rendezvous | None = field(default=None, repr=False)
    leavers: list[Callable[[], None]] = field(default_factory=list, repr=False)  # for groups beside ``group``

    @property
    def target(self) -> Standing:
        """The furthest member: everybody else must have its step, and is at its end if one that has it is."""
        assert self.standings is not None
        return max(self.standings, key=lambda standing: (standing.step, standing.done))

    @property
    def goal_step(self) -> int:
        """The step that every member must have: that of the furthest one, or of the newest copy where nobody has it."""
        return max(self.target.step, *(snapshot.step for snapshot in self.plan.restore), -1)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a member was when the generation was formed: steps committed, and whether its training is over."""

    rank: int
    step: int
    done: bool

    def encode(self) -> bytes:
        return _STANDING.pack(self.step, self.done)

    @classmethod
    def decode(cls, rank: int, value: bytes) -> Standing:
        return cls(rank, *_STANDING.unpack(value))


class Regrouper:
    """Forms groups from plans and hands them to the main thread.

    Args:
        open_rendezvous: a new connection to the coordinator's store.
        build: the process group of a formation, over the given rendezvous.
        formed: called when this worker's group of a generation can be used.
        failed: called when it could not be built, with the reason.
        met: called between the exchange of steps and the building of the group; a fault may strike there.
    """

    def __init__(
        self,
        worker: str,
        journal: Journal,
        open_rendezvous: Callable[[], Rendezvous],
        build: Callable[[Rendezvous, Plan, Member], Group],
        formed: Callable[[int], None],
        failed: Callable[[int, str], None],
        met: Callable[[Plan, Member], None] = lambda plan, me: None,
    ) -> None:
        self._worker, self._journal = worker, journal
        self.open_rendezvous, self._build = open_rendezvous, build
        self._formed, self._failed, self._met = formed, failed, met
        self._changed = threading.Condition()
        self._current: Formation | None = None  # newest formation that was begun
        self._soft: Plan | None = None  # newest plan that waits for a step boundary
        self._advancing = False  # the main thread is changing the step
        self._retired: list[Formation] = []
        self.dismissal: Dismissed | None = None
        self.step = 0  # committed steps of this worker, -1 without a state; written by the main thread only
        self.done = False

    # -- control thread -----------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """Take note of a plan. One that aborts is formed at once, another one at the next step boundary."""
        with self._changed:
            if self._current is not None and plan.generation <= self._current.plan.generation:
                return
            if plan.abort or self._current is None or self._current.broken:
                self._begin(plan)
            elif self._soft is None or plan.generation > self._soft.generation:
                self._soft = plan
                self._changed.notify_all()

    def _begin(self, plan: Plan) -> None:
        """Leave the current generation and form a new one, or none where this worker is to go. The lock is held."""
        me = plan.member(self._worker)
        previous = self._current
        last = me or (previous.me if previous is not None else None)
        assert last is not None, "a plan without this worker ends it before it comes here"
        self._current = Formation(plan, last)
        self._soft = None
        if previous is not None:
            _break(previous)
            self._retired.append(previous)
        if me is not None:
            name = f"form-{plan.generation}"
            threading.Thread(target=self._form, args=(self._current,), name=name, daemon=True).start()
        self._changed.notify_all()

    def dismiss(self, order: Dismissed) -> bool:
        """Have the main thread leave whatever generation it is in, and end. False: it has never been in any."""
        with self._changed:
            if self._current is None:
                return False
            self.dismissal = order
            _break(self._current)
            self._changed.notify_all()
            return True

    # -- forming threads ----------------------------------------------------------------------------------------

    def _form(self, formation: Formation) -> None:
        try:
            self._meet(formation)
        except GenerationSuperseded:
            return  # a newer formation is on its way
        except (RuntimeError, OSError, ChaoskitError) as error:
            with self._changed:
                formation.broken = True
                self._changed.notify_all()
            self._failed(formation.plan.generation, str(error)[:200])

    def _meet(self, formation: Formation) -> None:
        plan, rank = formation.plan, formation.me.rank
        rendezvous = self.open_rendezvous()
        with self._changed:
            self._changed.wait_for(lambda: not self._advancing or formation.broken)
            if formation.broken:
                rendezvous.close()
                return
            formation.rendezvous = rendezvous
            standing = Standing(rank, self.step, self.done)
        values = rendezvous.exchange(plan.generation, STANDING, rank, standing.encode())
        with self._changed:
            formation.standings = tuple(Standing.decode(other, value) for other, value in enumerate(values))
            self._changed.notify_all()
        self._met(plan, formation.me)
        group = self._build(rendezvous, plan, formation.me)
        with self._changed:
            if self.is_over(formation):
                group.close()  # not abort: a newer group's sockets may have appeared while this one was built
                return
            formation.group = group
            self._journal.write(Event.REGROUPED, generation=plan.generation, rank=rank, world=len(plan.members))
            self._formed(plan.generation)
            self._changed.notify_all()

    # -- main thread --------------------------------------------------------------------------------------------

    def membership_now(self) -> Formation | None:
        """The newest formation, if the steps of its members are known already, and this worker is not to end."""
        with self._changed:
            return self._current if self._is_known() and self.dismissal is None else None

    @property
    def left(self) -> Formation | None:
        """The newest formation, if this worker is to go: it waits for its end, or for a newer one with it."""
        with self._changed:
            current = self._current
            return current if current is not None and self._worker in current.plan.leavers else None

    def membership(self) -> Formation:
        """The newest formation, once the steps of its members are known.

        Raises:
            Dismissed: if this worker is to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.dismissal is not None or self._is_known())
            if self.dismissal is not None:
                raise self.dismissal
            assert self._current is not None
            return self._current

    def _is_known(self) -> bool:
        return self._current is not None and self._current.standings is not None

    def group(self, formation: Formation) -> Group:
        """The group of ``formation``, once it can be used.

        Raises:
            GenerationSuperseded: if there is a newer formation, or this one broke.
        """
        with self._changed:
            self._changed.wait_for(lambda: formation.group is not None or self.is_over(formation))
            if self.is_over(formation) or formation.group is None:
                raise GenerationSuperseded(f"generation {formation.plan.generation} is over")
            return formation.group

    def attach(self, formation: Formation, leave: Callable[[], None]) -> bool:
        """Have ``leave`` called as soon as ``formation`` is over. False: it is over already."""
        with self._changed:
            if not self.is_over(formation):
                formation.leavers.append(leave)
            return not self.is_over(formation)

    def wait_newer(self, formation: Formation, timeout_s: float | None = None) -> bool:
        """Wait until ``formation`` is not the newest one; False if that took longer than ``timeout_s``.

        Whoever is to end waits no longer, either.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._current is not formation or self.dismissal is not None, timeout_s
            )

    def is_over(self, formation: Formation) -> bool:
        """Whether it broke, or there is a newer one. May be called without waiting for a lock."""
        return formation.broken or self._current is not formation

    @property
    def vote(self) -> int:
        """Generation of the plan that waits for a step boundary, or of the current one."""
        with self._changed:
            newest = self._soft or (self._current.plan if self._current else None)
            return newest.generation if newest else 0

    def move_on(self, generation: int) -> bool:
        """At a step boundary that all ranks share: form the waiting plan, if all of them know it. Whether they do.

        Args:
            generation: the lowest :attr:`vote` of all ranks.
        """
        with self._changed:
            if self._soft is None or self._soft.generation > generation:
                return False
            self._begin(self._soft)
            return True

    def give_up(self, formation: Formation) -> None:
        """There will be no step boundary in ``formation`` any more: a waiting plan is formed at once."""
        with self._changed:
            formation.broken = True
            if self._soft is not None and self._current is formation:
                self._begin(self._soft)

    @contextmanager
    def advance(self, formation: Formation) -> Iterator[None]:
        """Hold off the report of this worker's step to newer generations while the block changes it.

        Raises:
            GenerationSuperseded: if another generation was begun: this rank's step may already be reported to it.
        """
        with self._changed:
            if self.is_over(formation):
                raise GenerationSuperseded("a newer generation was begun before the step could change")
            self._advancing = True
        try:
            yield
        finally:
            with self._changed:
                self._advancing = False
                self._changed.notify_all()

    def finish(self) -> None:
        """Training is over on this rank; it goes on to serve its state to others."""
        with self._changed:
            self.done = True

    def resume(self) -> None:
        """Training goes on after all: the last step must be taken again."""
        with self._changed:
            self.done = False

    def dispose_retired(self, afterwards: Callable[[], None]) -> None:
        """Free the groups of former generations, which takes gloo 10 ms a pair, off the main thread."""
        with self._changed:
            retired, self._retired = self._retired, []
        if not retired:
            return

        def dispose() -> None:
            for formation in retired:
                if formation.group is not None:
                    formation.group.close()
                if formation.rendezvous is not None:
                    formation.rendezvous.close()
            retired.clear()
            afterwards()

        threading.Thread(target=dispose, name="dispose", daemon=True).start()


def _break(formation: Formation) -> None:
    """Everybody out of its collectives; the lock is held."""
    formation.broken = True
    if formation.rendezvous is not None:
        formation.rendezvous.interrupt()
    if formation.group is not None:
        formation.group.abort()
    for leave in formation.leavers:
        leave()
