"""The move of a worker between generations, while its main thread may still be computing.

The control thread offers plans. Each plan is formed in its own thread, so that a newer plan never
waits for an older one that hangs in a half-built group. The main thread takes the results when it
needs them: first the committed steps of all members (which show the ranks that must catch up), then
the group.

-> coordinator/membership/regroup.py: when there is another generation, and with which workers.
group/generations.py: the decisions of this worker. step/restore.py: the state that it lacks.
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

_RESULTS = "results of collectives"  # rendezvous key for members that lack some
_result_lists = msgspec.msgpack.Decoder(tuple[bytes, ...])


class Dismissed(BaseException):
    """The order that this worker ends, while the others go on without it.

    It is a ``BaseException``, so that ``except Exception`` in user code does not catch it.
    """

    def __init__(self, grace_s: float, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self._until_s = time.monotonic() + grace_s

    @property
    def seconds_left(self) -> float:
        """The time in seconds until this process is ended in any case."""
        return max(0.0, self._until_s - time.monotonic())


@dataclass(eq=False, slots=True)
class Formation(Generation):
    """A generation with its group. The group is None until it can be used."""

    group: Group | None = None
    rendezvous: Rendezvous | None = field(default=None, repr=False)
    leavers: list[Callable[[], None]] = field(default_factory=list, repr=False)  # of other groups

    @property
    def store(self) -> Rendezvous:
        """The rendezvous of the members.

        Raises:
            RuntimeError: if this worker has not opened it yet. It has if there is a group.
        """
        if self.rendezvous is None:
            raise RuntimeError(f"the rendezvous of generation {self.plan.generation} is not open")
        return self.rendezvous


class Regrouper:
    """Forms groups from plans and hands them to the main thread.

    Attributes:
        dismissal: the order that this worker ends; None without one.

    Args:
        worker: the name of this worker.
        open_rendezvous: opens a new connection to the coordinator's store.
        build: builds the process group of a formation, over the given rendezvous.
        formed: called with the generation when this worker's group of it can be used.
        failed: called with generation and reason when the group could not be built.
        met: called between the exchange of steps and the building of the group; a fault may strike
            there.
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
        self._retired_formations: list[Formation] = []
        self._left_generation = 0  # the last generation before which this worker has left
        self.dismissal: Dismissed | None = None

    # -- control thread ----------------------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """Take in a plan, and return at once.

        The first plan and a plan that aborts are formed now, in a thread, and so is any plan if the
        current generation is broken. Other plans wait for the next step boundary. A plan that is
        not newer is ignored.

        Raises:
            ValueError: if the first plan has no place for this worker.
        """
        with self._changed:
            self._carry_out(self._course.offer(plan))

    def _carry_out(self, change: GenerationChange[Formation] | None) -> bool:
        """Leave a generation, and form its successor. The lock must be held.

        Return False if there is no change.
        """
        if change is None:
            return False
        if change.previous is not None:
            _break(change.previous)
            self._retired_formations.append(change.previous)
        if change.takes_part:
            name = f"form-{change.begun.plan.generation}"
            threading.Thread(
                target=self._form, args=(change.begun,), name=name, daemon=True
            ).start()
        self._changed.notify_all()
        return True

    def dismiss(self, order: Dismissed) -> bool:
        """Make the main thread leave its generation and end.

        Return False if it has never been in a generation; nothing is done then.
        """
        with self._changed:
            if self._course.current is None:
                return False
            self.dismissal = order
            _break(self._course.current)
            self._changed.notify_all()
            return True

    # -- forming threads ---------------------------------------------------------------------------

    def _form(self, formation: Formation) -> None:
        """Form a generation in a thread, and report if that fails and there is no newer one."""
        try:
            self._meet(formation)
        except GenerationSuperseded:
            return  # a newer formation is on its way
        except Exception as error:  # noqa: BLE001 - a rank that does not report is taken for hung
            with self._changed:
                formation.broken = True
                self._changed.notify_all()
            self._failed(formation.plan.generation, f"{type(error).__name__}: {error}"[:200])

    def _meet(self, formation: Formation) -> None:
        """Exchange the progress with the other members, and build the group.

        The formation gets the progress of all members, the results that it lacks, and the group.
        Then the journal is written, and the formed group is reported. A formation that is over gets
        no group, and nothing is reported.

        Raises:
            GenerationSuperseded: if there is a newer generation.
        """
        plan, rank = formation.plan, formation.me.rank
        rendezvous = self.open_rendezvous()
        with self._changed:
            self._changed.wait_for(lambda: self._course.may_report(formation))
            own_progress = self._course.progress_for(formation)
            if own_progress is None:
                rendezvous.close()
                return
            formation.rendezvous = rendezvous
        encoded_progress = rendezvous.exchange(
            plan.generation, STANDING, rank, own_progress.encode()
        )
        with self._changed:
            formation.learn(encoded_progress)
            self._changed.notify_all()
        self._share_results(rendezvous, formation, own_progress)
        self._met(plan, formation.me)
        group = self._build(rendezvous, plan, formation.me)
        with self._changed:
            if self.is_over(formation):
                group.close()  # not abort: a newer group's sockets may have appeared meanwhile
                return
            formation.group = group
            self._journal.write(
                Event.REGROUPED, generation=plan.generation, rank=rank, world=len(plan.members)
            )
            self._formed(plan.generation)
            self._changed.notify_all()

    def _share_results(
        self, rendezvous: Rendezvous, formation: Formation, own_progress: MemberProgress
    ) -> None:
        """Take over results of collectives from the member that has most, or provide them.

        Args:
            own_progress: the progress that this member has reported. Its results do not change
                before the main thread has met ``formation``.
        """
        if (holder := formation.holder) is None:
            return
        generation = formation.plan.generation
        if holder.rank == formation.me.rank:
            results = self.calls.results(own_progress.step)
            rendezvous.put(generation, _RESULTS, msgspec.msgpack.encode(results))
        else:
            results = _result_lists.decode(rendezvous.get(generation, _RESULTS))
        with self._changed:
            formation.results = results
            self._changed.notify_all()

    # -- main thread -------------------------------------------------------------------------------

    @property
    def calls(self) -> CollectiveLog:
        """This worker's collectives since the last commit.

        Results are added only within :meth:`advance`.
        """
        return self._course.calls

    def results(self, formation: Formation) -> tuple[bytes, ...]:
        """Return the results of the holder in ``formation``, once they have arrived.

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
        """The committed steps of this worker, -1 without a state.

        Written only by the main thread.
        """
        return self._course.step

    @step.setter
    def step(self, step: int) -> None:
        self._course.step = step

    @property
    def done(self) -> bool:
        """True if the training of this worker is over."""
        return self._course.done

    def membership_now(self) -> Formation | None:
        """Return the newest formation without waiting.

        Return None if its members have not exchanged their steps yet, or if this worker must end.
        """
        with self._changed:
            return self._course.met if self.dismissal is None else None

    def note_left(self, *, ordered: bool = False) -> None:
        """Journal that this worker leaves at this step boundary, if it does.

        Each such plan is journalled once. Wait first for a step change in progress.

        Args:
            ordered: True if the worker was ordered to end. It may not have reached the boundary
                itself.
        """
        with self._changed:
            current, departing = self._course.current, self._course.departing
            boundary = departing.plan if departing is not None else None
            plan = self._course.departure if ordered else boundary
            if current is None or plan is None or plan.generation == self._left_generation:
                return
            self._changed.wait_for(lambda: self._course.may_report(current))
            self._left_generation = plan.generation
            self._journal.write(
                Event.LEFT, step=self._course.step, generation=plan.generation, rank=current.me.rank
            )

    def membership(self) -> Formation:
        """Return the newest formation, once its members have exchanged their steps.

        Raises:
            Dismissed: if this worker must end.
        """
        with self._changed:
            while self.dismissal is None:
                if (formation := self._course.met) is not None:
                    return formation
                self._changed.wait()
            raise self.dismissal

    def group(self, formation: Formation) -> Group:
        """Return the group of ``formation``, once it can be used.

        Raises:
            GenerationSuperseded: if there is a newer formation, or this one broke.
        """
        with self._changed:
            self._changed.wait_for(lambda: formation.group is not None or self.is_over(formation))
            if self.is_over(formation) or formation.group is None:
                raise GenerationSuperseded(f"generation {formation.plan.generation} is over")
            return formation.group

    def attach(self, formation: Formation, leave: Callable[[], None]) -> bool:
        """Have ``leave`` called once a newer generation is begun, or this worker must end.

        Return False if ``formation`` is over already; ``leave`` is not called then.

        Args:
            leave: called from any thread, perhaps more than once.
        """
        with self._changed:
            if not self.is_over(formation):
                formation.leavers.append(leave)
            return not self.is_over(formation)

    def wait_newer(self, formation: Formation, timeout_s: float | None = None) -> bool:
        """Wait until ``formation`` is not the newest one, or this worker must end.

        Return False if that took longer than ``timeout_s``.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._course.current is not formation or self.dismissal is not None,
                timeout_s,
            )

    def first_reporter(self, formation: Formation) -> str:
        """Return the worker that first reported that ``formation`` broke, or "" if unknown.

        It is known from the plan that directly follows.
        """
        with self._changed:
            current = self._course.current
            if current is None or current.plan.generation != formation.plan.generation + 1:
                return ""
            return current.plan.broken_by

    def is_over(self, formation: Formation) -> bool:
        """Return whether ``formation`` broke, or there is a newer one. Needs no lock."""
        return self._course.is_over(formation)

    @property
    def vote(self) -> int:
        """The generation of the plan that waits for a step boundary, or else of the current one.

        0 before the first plan.
        """
        with self._changed:
            return self._course.vote

    def move_on(self, generation: int) -> bool:
        """Form the waiting plan at a step boundary that all ranks share.

        Return True if the world changes. Return False if no plan waits, or a rank does not have it
        yet.

        Args:
            generation: the lowest :attr:`vote` of all ranks.
        """
        with self._changed:
            return self._carry_out(self._course.move_on(generation))

    def give_up(self, formation: Formation) -> None:
        """Mark ``formation`` as broken.

        It has no more step boundaries, so a waiting plan is formed at once.
        """
        with self._changed:
            self._carry_out(self._course.give_up(formation))

    @contextmanager
    def advance(self, formation: Formation) -> Iterator[None]:
        """Withhold this worker's step from newer generations while the block changes it.

        Raises:
            GenerationSuperseded: if ``formation`` broke, or another generation was begun, to which
                the step may have been reported.
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
        """Mark the training of this rank as over. It goes on to serve its state to others."""
        with self._changed:
            self._course.done = True

    def resume(self) -> None:
        """Mark the training as not over: the last step must be taken again."""
        with self._changed:
            self._course.done = False

    def dispose_retired(self, afterwards: Callable[[], None]) -> None:
        """Free the groups of former generations in a thread, as gloo needs 10 ms for each pair.

        Args:
            afterwards: called in that thread when they are freed; not called if there are none.
        """
        with self._changed:
            formations, self._retired_formations = self._retired_formations, []
        if not formations:
            return

        def dispose() -> None:
            for formation in formations:
                if formation.group is not None:
                    formation.group.close()
                if formation.rendezvous is not None:
                    formation.rendezvous.close()
            formations.clear()
            afterwards()

        threading.Thread(target=dispose, name="dispose", daemon=True).start()


def _break(formation: Formation) -> None:
    """Make all ranks leave the collectives of ``formation``. The lock must be held."""
    formation.broken = True
    if formation.rendezvous is not None:
        formation.rendezvous.interrupt()
    if formation.group is not None:
        formation.group.abort()
    for leave in formation.leavers:
        leave()
