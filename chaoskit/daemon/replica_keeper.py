"""A node's part of the memory tier: what its workers have committed outlives them.

Their keeper maps the arena of each of them. When a worker ends outside an update, its arena holds the last
committed state, at no cost while training. In case that all workers end in the middle of an update, a few nodes also
copy committed states, as often as :class:`~chaoskit.daemon.copy_budget.CopyBudget` says. Copies are made, and seals
computed, on a thread of low priority. Nothing is offered until the coordinator asks, which it does when no live worker
has the state: while there is one, what the dead have left is not even read.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chaoskit.checkpoint.disk.portion import Portion, copy_shared
from chaoskit.checkpoint.layout.arena import ArenaView, decode_index
from chaoskit.checkpoint.layout.finite import Poisoned
from chaoskit.checkpoint.layout.seal import Torn, seal
from chaoskit.checkpoint.memory.tier import Copy, MemoryTier
from chaoskit.config import RunConfig
from chaoskit.daemon.copy_budget import CopyBudget
from chaoskit.daemon.copy_faults import KeptCopy
from chaoskit.daemon.keeper_base import NodeContext, NodeKeeper
from chaoskit.daemon.saving import Saver
from chaoskit.errors import ChaoskitError
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import lower_priority, raise_priority, reason_of
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Holding, Plan, Sealed, Snapshot

_NICENESS = 10  # of this thread: below training, which is below everything on the way of a recovery


def keepers(plan: Plan, config: RunConfig) -> dict[str, str]:
    """Which nodes copy whose state: the lowest rank of as many nodes as there are copies, in as many racks as possible.

    The first nodes of all racks come before the second of any: then losing a rack does not lose every copy.
    """
    first: dict[str, str] = {}
    for member in plan.members:
        first.setdefault(member.node, member.worker)
    taken: Counter[str] = Counter()
    places: list[tuple[int, str]] = []
    for node in first:
        rack = config.rack(node)
        places.append((taken[rack], node))
        taken[rack] += 1
    chosen = sorted(places, key=lambda place: place[0])[: config.memory_copies]
    return {node: first[node] for _, node in chosen}


@dataclass(slots=True)
class _Kept:
    """A worker whose arena is mapped here."""

    view: ArenaView
    board: Board


class Keeper(NodeKeeper):
    """Maps, copies, seals and offers."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context, _NICENESS)
        self._kept: dict[str, _Kept] = {}  # of workers that live
        self._left: tuple[str, ArenaView] | None = (
            None  # the newest arena that a worker has left behind, complete
        )
        self._tier = MemoryTier(self.breakpoints.reach)
        self._source = ""  # whose commits are copied
        self._copied_of = ""  # whose state the newest copy is
        self._copied_sequence = -1  # of that state when it was copied
        self._budget = CopyBudget(every_step=self._config.copies == "every_step")
        self._told_interval = (
            0,
            0,
        )  # between copies, as the journal knows it: generation and commits
        self._stored_from = (
            ""  # whose commits this node's share of a stored snapshot is copied from
        )
        self._saved = (-1, -1)  # the age of the state of which it was last copied
        self._begun = 0  # the newest generation of which a state was seen
        self._start()

    # -- orders ---------------------------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """A worker is ready: map its arena, if it has one."""
        if endpoint.arena_fd >= 0:
            with contextlib.suppress(OSError, ValueError):  # it has ended already
                view = ArenaView.open(f"/proc/{endpoint.pid}/fd/{endpoint.arena_fd}")
                self._orders.give(lambda: self._kept.update({worker: _Kept(view, board)}))
                return
        os.close(board.bell)

    def hold(self, holding: Holding) -> None:
        """A worker holds a piece of a sharded state: not one of these."""
        raise AssertionError(f"{holding.worker} trains a replica")

    def went_on(self, step: int) -> None:
        """A live worker of this node has committed ``step`` steps: older states that others left are of no use."""
        left = self._left
        if left is not None and left[1].step < step:
            self._orders.give(lambda: self._forget_older(step))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _bells(self) -> dict[int, Callable[[], None]]:
        chosen = {self._source, self._stored_from} - {""}
        return {
            self._kept[worker].board.bell: partial(self._committed, worker) for worker in chosen
        }

    def _follow(self, plan: Plan) -> None:
        source = keepers(plan, self._config).get(self._node, "")
        first = next((member.worker for member in plan.members if member.node == self._node), "")
        self._plan = plan
        self._archive.follow(plan.generation)
        before = {self._source, self._stored_from}
        self._source = source if source in self._kept else ""
        self._stored_from = first if first in self._kept and self._archive.saver is not None else ""
        self._budget.begin(alone=len({member.node for member in plan.members}) == 1)
        self._told_interval = 0, 0
        chosen = {self._source, self._stored_from} - {""}
        for worker in before - chosen:
            if worker in self._kept:
                self._kept[worker].board.copying(False)
        if (
            self._source and plan.generation == 1
        ):  # later ones repeat a step, from which this would take CPU time
            with contextlib.suppress(MemoryError, OSError):  # the first copy will report it
                self._tier.reserve(self._kept[self._source].view)
        for worker in chosen:
            kept = self._kept[worker]
            kept.board.copying(True)
            saver = self._archive.saver if worker == self._stored_from else None
            kept.board.due(saver.due.after(kept.view.step) if saver is not None else 0)
            if kept.view.generation == plan.generation:  # it rang before anybody listened
                self._committed(worker)

    def _committed(self, worker: str) -> None:
        """A worker has committed a state: copy what is wanted of it, and let it go on."""
        kept = self._kept[worker]
        if not kept.view.is_complete:
            return  # it rings again when its script is done with this state
        step, until = kept.view.step, math.inf
        dues: list[int] = []  # steps for whose copies it may be waited for longer
        if worker == self._source:
            self._copy(kept)
            until = self._budget.let_go
            if self._budget.due:
                dues.append(self._budget.due)
        if worker == self._stored_from and self._archive.saver is not None:
            self._save(kept, self._archive.saver)
            dues.append(self._archive.saver.due.after(step))
            until = min(until, dues[-1] - 1)
        kept.board.due(min(dues, default=0))
        kept.board.copied(
            max(step, int(until))
        )  # of what is let go, its writer need not wait either

    def _save(self, kept: _Kept, saver: Saver) -> None:
        """Have this node's share of a state stored whose step is due: rather from our own copy, which stands still."""
        plan, views = self._plan, [*(copy.view for copy in self._tier.copies()), kept.view]
        view = next((view for view in views if self._is_due(view, saver)), None)
        if plan is None or view is None:
            return
        step, generation = self._saved = view.step, view.generation
        if not saver.wants(self._saved):
            return
        if view is not kept.view:
            kept.board.copied(step)
        for portion in self._share(view, plan, generation):
            saver.offer(portion)

    def _share(
        self, view: ArenaView, plan: Plan, generation: int, *, last: bool = False
    ) -> list[Portion]:
        """This node's part of a state, copied; nothing if it cannot be."""
        nodes, step = list(dict.fromkeys(member.node for member in plan.members)), view.step
        number, count = nodes.index(self._node), len(nodes)
        try:
            slots, scalars = decode_index(view.index_bytes(), view.size_bytes), view.scalars_bytes()
            boxes = copy_shared(view, slots, number, count)
        except (ChaoskitError, OSError) as error:
            self._refuse(step, error)
            return []
        world = len(plan.members)
        return [
            Portion(step, generation, number, count, world, not number, tuple(boxes), scalars, last)
        ]

    def _save_present(self, saver: Saver, step: int) -> None:
        """See there. A member of a newer generation that still has this state counts, too."""
        kept, plan = self._kept.get(self._stored_from), self._plan
        if kept is None or plan is None:
            return
        view = kept.view
        sequence = view.sequence
        if view.step != step or not view.generation or not view.is_complete:
            return
        age = (step, plan.generation)
        if saver.newest == age or not saver.wants(age):
            return
        portions = self._share(view, plan, plan.generation)
        if view.sequence != sequence:
            return  # the writer did not wait, and has left this step
        self._saved = age
        for portion in portions:
            saver.offer(portion)

    def _last(self) -> list[Portion]:
        views = [
            kept.view
            for kept in self._kept.values()
            if kept.view.generation and kept.view.is_complete
        ]
        plan = self._plan
        views += [self._left[1]] if self._left is not None else []
        if plan is None or not views or all(member.node != self._node for member in plan.members):
            return []
        return self._share(max(views, key=_age), plan, plan.generation, last=True)

    def _is_due(self, view: ArenaView, saver: Saver) -> bool:
        """Whether the state is one that this membership has committed, and that is to be stored."""
        if self._plan is None or view.generation != self._plan.generation:
            return False
        if view.generation != self._begun:  # what a membership begins with is not new
            self._begun, self._saved = view.generation, (view.step, view.generation)
        return (view.step, view.generation) > self._saved and saver.due.at(view.step)

    def _copy(self, kept: _Kept) -> None:
        """Copy the state that was just committed, if its turn has come. Training never waits long for it."""
        step, has = kept.view.step, self._has(kept.view.step)
        is_stale = (
            has and self._copied_sequence != kept.view.sequence
        )  # the script wrote into it since
        if not self._budget.wants(step, kept.view.generation, time.monotonic()) and not is_stale:
            return
        if has and not is_stale:  # a new generation of the same state
            self._budget.copied(step, None)
        elif not self._try_to_copy(kept.view, step):
            return
        self._tell_interval(step, kept.view.generation)

    def _has(self, step: int) -> bool:
        return self._copied_of == self._source and any(
            copy.seal.step == step for copy in self._tier.copies()
        )

    def _try_to_copy(self, view: ArenaView, step: int) -> bool:
        """Whether a copy was made. Training never ends because of it."""
        sequence = view.sequence
        began_s = (
            time.thread_time()
        )  # not wall time: while this thread waits for a CPU, it takes nothing from training
        try:
            sealed = self._tier.save(view)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with a copy, training goes on
            self._budget.failed(step)
            reason = reason_of(error)
            self._journal.write(Event.COPY_FAILED, worker=self._source, step=step, reason=reason)
            return False
        self._copied_of, self._copied_sequence = self._source, sequence
        self._budget.copied(sealed.step, time.thread_time() - began_s)
        return True

    def _tell_interval(self, step: int, generation: int) -> None:
        """Write down how often is copied while that generation trains; not again while that stays so."""
        budget = self._budget
        if (generation, budget.every) == self._told_interval:
            return
        self._told_interval = generation, budget.every
        self._journal.write(
            Event.COPY_INTERVAL,
            worker=self._source,
            step=step,
            generation=generation,
            every=budget.every,
            step_ms=round(1e3 * budget.step_s, 3),
            cost_ms=round(1e3 * budget.cost_s, 3),
        )

    # -- what faults do to copies ---------------------------------------------------------------------------------

    def kept(self, worker: str) -> list[KeptCopy]:
        """See :class:`chaoskit.daemon.injection.KeepsCopies`. The newest one; what a worker leaves is no copy."""
        copies = self._tier.copies() if worker == self._copied_of else []
        return [
            KeptCopy(worker, "memory", seal, f"/proc/self/fd/{view.fd}", in_header=False)
            for seal, view in copies
        ]

    def owes(self, worker: str, step: int) -> bool:
        """See there."""
        return worker == self._source and self._budget.seen < step

    def lose(self, copies: list[KeptCopy]) -> None:
        """See there."""
        if copies:
            self._tier = MemoryTier()

    # -- what outlives a worker -----------------------------------------------------------------------------------

    def _ended(self, worker: str) -> None:
        kept = self._kept.pop(worker, None)
        self._source = "" if worker == self._source else self._source
        self._stored_from = "" if worker == self._stored_from else self._stored_from
        if kept is None:
            return
        os.close(kept.board.bell)
        if not kept.view.generation or kept.view.step < 0:
            return  # it never had the state of the training, or gave it up
        if kept.view.sequence % 2 or not kept.view.is_complete:
            self._note_torn(worker, kept)
            return
        if self._left is None or _age(self._left[1]) <= _age(kept.view):
            self._left = worker, kept.view

    def _note_torn(self, worker: str, kept: _Kept) -> None:
        """A worker has ended while its state was written: in an update, unless it took over a newer generation's.

        Or between two steps, in code that writes into the state: then the last step counts as not committed.
        """
        if kept.view.generation == kept.board.generation:
            step, generation = kept.board.step, kept.view.generation
            if not kept.view.sequence % 2:
                step -= 1
            self._journal.write(Event.TORN, worker=worker, step=step, generation=generation)

    def _forget_older(self, step: int) -> None:
        if self._left is not None and self._left[1].step < step:
            self._left = None
            self._offers.withdraw([])

    def _recall(self, number: int) -> None:
        raise_priority()  # a recovery waits for this
        copies = [(self._copied_of, copy) for copy in self._tier.copies()]
        if self._left is not None:
            worker, view = self._left
            try:
                copies.append((worker, Copy(seal(view), view)))
            except (Torn, Poisoned) as error:  # not torn: its writer has ended
                reason = reason_of(error)
                self._journal.write(Event.COPY_FAILED, worker=worker, step=view.step, reason=reason)
        self._offers.withdraw([copy.view for _, copy in copies])
        snapshots: tuple[Snapshot, ...] = ()
        with contextlib.suppress(
            OSError
        ):  # no descriptor or port for a server: others may have copies
            snapshots = tuple(
                self._offers.offer(worker, copy.seal, copy.view) for worker, copy in copies
            )
        for offered in snapshots:
            self._journal.write(
                Event.SEALED,
                worker=offered.worker,
                step=offered.step,
                generation=offered.generation,
                checksum=offered.checksum,
            )
        self._archive.answer(Sealed(self._node, snapshots, number), self._tell)
        lower_priority(self._niceness)


def _age(view: ArenaView) -> tuple[int, int]:
    return view.step, view.generation
