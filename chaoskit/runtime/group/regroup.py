"""How a worker moves from one generation to the next, while its main thread may still be computing.

The control thread offers plans; each plan is formed in a thread of its own, so that a newer plan never waits for an
older one that hangs in a half-built group. The main thread meets the result when it needs it: first the steps that
every member has committed (to see who must catch up), then the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from chaoskit.journal import Journal
from chaoskit.runtime.group.collective_log import CollectiveLog
from chaoskit.runtime.group.generations import (
    Generation,
    GenerationChange,
    GenerationCourse,
    MemberProgress,
)
from chaoskit.runtime.group.process_group import Group
from chaoskit.runtime.group.rendezvous import GenerationSuperseded, Rendezvous
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import STANDING, Member, Plan

_RESULTS = "results of collectives"  # key, for members that lack some
_result_lists = msgspec.msgpack.Decoder(tuple[bytes, ...])


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


@dataclass(eq=False, slots=True)
class Formation(Generation):
    """A generation with its group, which is None until it can be used."""

    group: Group | None = None
    rendezvous: Rendezvous | None = field(default=None, repr=False)
    leavers: list[Callable[[], None]] = field(
        default_factory=list, repr=False
    )  # for groups beside ``group``


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
        self._journal = journal
        self.open_rendezvous, self._build = open_rendezvous, build
        self._formed, self._failed, self._met = formed, failed, met
        self._changed = threading.Condition()
        self._course = GenerationCourse(worker, Formation)
        self._retired: list[Formation] = []
        self._left = 0  # the last generation that this worker is known to have left before
        self.dismissal: Dismissed | None = None

    # -- control thread -----------------------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """Take note of a plan. One that aborts is formed at once, another one at the next step boundary."""
        with self._changed:
            self._carry_out(self._course.offer(plan))

    def _carry_out(self, change: GenerationChange[Formation] | None) -> bool:
        """Leave a generation, and form its successor. False: there is none to form. The lock is held."""
        if change is None:
            return False
        if change.previous is not None:
            _break(change.previous)
            self._retired.append(change.previous)
        if change.takes_part:
            name = f"form-{change.begun.plan.generation}"
            threading.Thread(
                target=self._form, args=(change.begun,), name=name, daemon=True
            ).start()
        self._changed.notify_all()
        return True

    def dismiss(self, order: Dismissed) -> bool:
        """Have the main thread leave whatever generation it is in, and end. False: it has never been in any."""
        with self._changed:
            if self._course.current is None:
                return False
            self.dismissal = order
            _break(self._course.current)
            self._changed.notify_all()
            return True

    # -- forming threads ----------------------------------------------------------------------------------------

    def _form(self, formation: Formation) -> None:
        try:
            self._meet(formation)
        except GenerationSuperseded:
            return  # a newer formation is on its way
        except Exception as error:  # noqa: BLE001 - whatever it is, a rank that says nothing is taken for one that hangs
            with self._changed:
                formation.broken = True
                self._changed.notify_all()
            self._failed(formation.plan.generation, f"{type(error).__name__}: {error}"[:200])

    def _meet(self, formation: Formation) -> None:
        plan, rank = formation.plan, formation.me.rank
        rendezvous = self.open_rendezvous()
        with self._changed:
            self._changed.wait_for(lambda: self._course.may_report(formation))
            standing = self._course.progress_for(formation)
            if standing is None:
                rendezvous.close()
                return
            formation.rendezvous = rendezvous
        values = rendezvous.exchange(plan.generation, STANDING, rank, standing.encode())
        with self._changed:
            formation.learn(values)
            self._changed.notify_all()
        self._share_results(rendezvous, formation, standing)
        self._met(plan, formation.me)
        group = self._build(rendezvous, plan, formation.me)
        with self._changed:
            if self.is_over(formation):
                group.close()  # not abort: a newer group's sockets may have appeared while this one was built
                return
            formation.group = group
            self._journal.write(
                Event.REGROUPED, generation=plan.generation, rank=rank, world=len(plan.members)
            )
            self._formed(plan.generation)
            self._changed.notify_all()

    def _share_results(
        self, rendezvous: Rendezvous, formation: Formation, told: MemberProgress
    ) -> None:
        """Have results of collectives that some members lack: from the one that has most, or for the others.

        Args:
            told: what this member has said of itself. Its results stay what they are until ``formation`` is met.
        """
        if (holder := formation.holder) is None:
            return
        generation = formation.plan.generation
        if holder.rank == formation.me.rank:
            results = self.calls.results(told.step)
            rendezvous.put(generation, _RESULTS, msgspec.msgpack.encode(results))
        else:
            results = _result_lists.decode(rendezvous.get(generation, _RESULTS))
        with self._changed:
            formation.results = results
            self._changed.notify_all()

    # -- main thread --------------------------------------------------------------------------------------------

    @property
    def calls(self) -> CollectiveLog:
        """This worker's collectives since the last commit. Results are added within :meth:`advance` only."""
        return self._course.calls

    def results(self, formation: Formation) -> tuple[bytes, ...]:
        """What the holder of results in ``formation`` has, once it is here.

        Raises:
            GenerationSuperseded: if there is a newer formation, or this one broke.
        """
        with self._changed:
            self._changed.wait_for(lambda: formation.results is not None or self.is_over(formation))
            if self.is_over(formation) or formation.results is None:
                raise GenerationSuperseded(f"generation {formation.plan.generation} is over")
            return formation.results

    @property
    def step(self) -> int:
        """Committed steps of this worker, -1 without a state; written by the main thread only."""
        return self._course.step

    @step.setter
    def step(self, step: int) -> None:
        self._course.step = step

    @property
    def done(self) -> bool:
        """Whether its training is over."""
        return self._course.done

    def membership_now(self) -> Formation | None:
        """The newest formation, if the steps of its members are known already, and this worker is not to end."""
        with self._changed:
            return self._course.known if self.dismissal is None else None

    def note_left(self, *, told: bool = False) -> None:
        """Write down that this worker leaves at this step boundary: once, and only if it does.

        Args:
            told: it was told to end, as the others go on without it. It may not have come so far itself.
        """
        with self._changed:
            current, departing = self._course.current, self._course.departing
            boundary = departing.plan if departing is not None else None
            plan = self._course.farewell if told else boundary
            if current is None or plan is None or plan.generation == self._left:
                return
            self._changed.wait_for(lambda: self._course.may_report(current))
            self._left = plan.generation
            self._journal.write(
                Event.LEFT, step=self._course.step, generation=plan.generation, rank=current.me.rank
            )

    def membership(self) -> Formation:
        """The newest formation, once the steps of its members are known.

        Raises:
            Dismissed: if this worker is to end.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.dismissal is not None or self._course.known is not None
            )
            if self.dismissal is not None:
                raise self.dismissal
            assert self._course.known is not None
            return self._course.known

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

        A worker that is to end waits no longer, either.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._course.current is not formation or self.dismissal is not None,
                timeout_s,
            )

    def breaker_of(self, formation: Formation) -> str:
        """The worker that was the first one to report that ``formation`` broke; "" if that is not known."""
        with self._changed:
            current = self._course.current
            if current is None or current.plan.generation != formation.plan.generation + 1:
                return ""
            return current.plan.broken_by

    def is_over(self, formation: Formation) -> bool:
        """Whether it broke, or there is a newer one. May be called without waiting for a lock."""
        return self._course.is_over(formation)

    @property
    def vote(self) -> int:
        """Generation of the plan that waits for a step boundary, or of the current one."""
        with self._changed:
            return self._course.vote

    def move_on(self, generation: int) -> bool:
        """At a step boundary that all ranks share: form the waiting plan, if all of them know it. Whether they do.

        Args:
            generation: the lowest :attr:`vote` of all ranks.
        """
        with self._changed:
            return self._carry_out(self._course.move_on(generation))

    def give_up(self, formation: Formation) -> None:
        """There will be no step boundary in ``formation`` any more: a waiting plan is formed at once."""
        with self._changed:
            self._carry_out(self._course.give_up(formation))

    @contextmanager
    def advance(self, formation: Formation) -> Iterator[None]:
        """Hold off the report of this worker's step to newer generations while the block changes it.

        Raises:
            GenerationSuperseded: if another generation was begun: this rank's step may already be reported to it.
        """
        with self._changed:
            if not self._course.begin_step_change(formation):
                raise GenerationSuperseded(
                    "a newer generation was begun before the step could change"
                )
        try:
            yield
        finally:
            with self._changed:
                self._course.end_step_change()
                self._changed.notify_all()

    def finish(self) -> None:
        """Training is over on this rank; it goes on to serve its state to others."""
        with self._changed:
            self._course.done = True

    def resume(self) -> None:
        """Training goes on after all: the last step must be taken again."""
        with self._changed:
            self._course.done = False

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
