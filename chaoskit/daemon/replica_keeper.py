"""Keeper of a node in a job of replicas: committed states outlive their workers.

The keeper maps the arena of each worker of its node. When a worker ends outside an update, its
arena holds the last committed state, at no cost during training. All workers may end in the middle
of an update. For this case a few nodes also copy committed states, as often as
:class:`~chaoskit.daemon.copy_budget.CopyBudget` allows. Copies and seals are made on a thread of
low priority. Nothing is offered until the coordinator asks, which it does when no live worker has
the state. Before that, arenas of dead workers are not even read.

-> ``checkpoint/memory/tier.py``: the copies. ``daemon/saving.py``: what is stored on disk.
-> ``coordinator/membership/copy_search.py``: chooses among the offered copies.
-> ``runtime/state/peer.py``: a fresh worker reads one.
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
from chaoskit.process.linux import lower_priority, raise_priority, reason_of
from chaoskit.process.progress_board import Board
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Endpoint, Holding, OfferedSnapshot, Plan, Sealed

_NICENESS = 10  # below training, which is below all that a recovery waits for


def keepers(plan: Plan, config: RunConfig) -> dict[str, str]:
    """Return the nodes that copy states, each with the worker whose state it copies.

    These are the lowest ranks of as many nodes as there are copies, in as many racks as possible.
    The first nodes of all racks come before the second of any, so that the loss of a rack does not
    take every copy.

    Args:
        plan: the members of the generation, by rank.
        config: settings with the number of copies and the racks.
    """
    first_workers: dict[str, str] = {}
    for member in plan.members:
        first_workers.setdefault(member.node, member.worker)
    nodes_taken: Counter[str] = Counter()
    candidates: list[tuple[int, str]] = []
    for node in first_workers:
        rack = config.rack(node)
        candidates.append((nodes_taken[rack], node))
        nodes_taken[rack] += 1
    chosen = sorted(candidates, key=lambda place: place[0])[: config.memory_copies]
    return {node: first_workers[node] for _, node in chosen}


@dataclass(slots=True)
class _MappedWorker:
    """A worker whose arena is mapped in this process."""

    view: ArenaView
    board: Board


class ReplicaKeeper(NodeKeeper):
    """The keeper of a replicated state: it maps, copies, seals and offers arenas."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context, _NICENESS)
        self._mapped: dict[str, _MappedWorker] = {}  # live workers
        # the newest complete arena of an ended worker
        self._left_arena: tuple[str, ArenaView] | None = None
        self._tier = MemoryTier(self.breakpoints.reach)
        self._source = ""  # worker whose commits are copied
        self._copied_of = ""  # worker whose state the newest copy holds
        self._copied_sequence = -1  # sequence number of that state when it was copied
        self._budget = CopyBudget(every_step=self._config.copies == "every_step")
        # generation and interval between copies that the journal has
        self._reported_interval = 0, 0
        # worker from whose commits this node's share of a snapshot is copied
        self._stored_from = ""
        self._offered_age = (-1, -1)  # age of the state of which this share was last copied
        self._due_generation = 0  # the newest generation of a state that was due
        self._start()

    # -- orders ------------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """Map the arena of a worker that is ready, if it has one; otherwise close its event."""
        if endpoint.arena_fd >= 0:
            with contextlib.suppress(OSError, ValueError):  # the worker has ended already
                view = ArenaView.open(f"/proc/{endpoint.pid}/fd/{endpoint.arena_fd}")
                self._orders.give(lambda: self._mapped.update({worker: _MappedWorker(view, board)}))
                return
        os.close(board.bell)

    def hold(self, holding: Holding) -> None:
        """Raise AssertionError: workers of a job of replicas hold no pieces."""
        raise AssertionError(f"{holding.worker} trains a replica")

    def went_on(self, step: int) -> None:
        """Queue the release of an ended worker's arena if it is older than ``step``.

        A live worker of this node has committed that step.
        """
        left = self._left_arena
        if left is not None and left[1].step < step:
            self._orders.give(lambda: self._forget_older(step))

    # -- the thread --------------------------------------------------------------------------------

    def _event_handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handler of each event of a worker whose commits are copied or stored."""
        watched = {self._source, self._stored_from} - {""}
        return {
            self._mapped[worker].board.bell: partial(self._committed, worker) for worker in watched
        }

    def _follow(self, plan: Plan) -> None:
        """Choose the workers whose commits are copied and stored in the new generation.

        Their boards are set so that they announce each commit and wait for its copy.
        """
        source = keepers(plan, self._config).get(self._node, "")
        first = next((member.worker for member in plan.members if member.node == self._node), "")
        self._plan = plan
        self._archive.follow(plan.generation)
        before = {self._source, self._stored_from}
        self._source = source if source in self._mapped else ""
        self._stored_from = (
            first if first in self._mapped and self._archive.saver is not None else ""
        )
        self._budget.begin(alone=len({member.node for member in plan.members}) == 1)
        self._reported_interval = 0, 0
        watched = {self._source, self._stored_from} - {""}
        for worker in before - watched:
            if worker in self._mapped:
                self._mapped[worker].board.copying(False)
        # not in later generations, which repeat a step that would lose CPU time to this
        if self._source and plan.generation == 1:
            with contextlib.suppress(MemoryError, OSError):  # the first copy will report it
                self._tier.reserve(self._mapped[self._source].view)
        for worker in watched:
            mapped = self._mapped[worker]
            mapped.board.copying(True)
            saver = self._archive.saver if worker == self._stored_from else None
            mapped.board.due(saver.due.earliest_after(mapped.view.step) if saver is not None else 0)
            # its event may have been set before it was waited for
            if mapped.view.generation == plan.generation:
                self._committed(worker)

    def _committed(self, worker: str) -> None:
        """Copy and store a committed state, as far as needed, and let the worker go on."""
        mapped = self._mapped[worker]
        if not mapped.view.is_complete:
            return  # the event is set again when the script has finished with this state
        step, until = mapped.view.step, math.inf
        dues: list[int] = []  # steps for whose copies the worker may wait longer
        if worker == self._source:
            self._copy(mapped)
            until = self._budget.skipped_until
            if self._budget.due:
                dues.append(self._budget.due)
        if worker == self._stored_from and self._archive.saver is not None:
            self._save(mapped, self._archive.saver)
            dues.append(self._archive.saver.due.earliest_after(step))
            until = min(until, dues[-1] - 1)
        mapped.board.due(min(dues, default=0))
        # the worker need not wait for skipped copies either
        mapped.board.copied(max(step, int(until)))

    def _save(self, mapped: _MappedWorker, saver: Saver) -> None:
        """Offer this node's share of a state whose step is due to the saver.

        Prefer the keeper's copy, which never changes, to the worker's arena.
        """
        plan, views = self._plan, [*(copy.view for copy in self._tier.copies()), mapped.view]
        view = next((view for view in views if self._is_due(view, saver)), None)
        if plan is None or view is None:
            return
        step, generation = self._offered_age = view.step, view.generation
        if not saver.wants(self._offered_age):
            return
        if view is not mapped.view:
            mapped.board.copied(step)
        for portion in self._copy_share(view, plan, generation):
            saver.offer(portion)

    def _copy_share(
        self, view: ArenaView, plan: Plan, generation: int, *, last: bool = False
    ) -> list[Portion]:
        """Return a copy of this node's part of a state as a portion, or [] if it cannot be read.

        The failure is then recorded in the journal.
        """
        nodes, step = list(dict.fromkeys(member.node for member in plan.members)), view.step
        number, count = nodes.index(self._node), len(nodes)
        try:
            slots, scalars = decode_index(view.index_bytes(), view.size_bytes), view.scalars_bytes()
            boxes = copy_shared(view, slots, number, count)
        except (ChaoskitError, OSError) as error:
            self._record_failure(step, error)
            return []
        world = len(plan.members)
        return [
            Portion(step, generation, number, count, world, not number, tuple(boxes), scalars, last)
        ]

    def _save_present(self, saver: Saver, step: int) -> None:
        """Offer this node's part; see the base class.

        A member of a newer generation that still has this state counts, too.
        """
        mapped, plan = self._mapped.get(self._stored_from), self._plan
        if mapped is None or plan is None:
            return
        view = mapped.view
        sequence = view.sequence
        if view.step != step or not view.generation or not view.is_complete:
            return
        age = (step, plan.generation)
        if saver.newest == age or not saver.wants(age):
            return
        portions = self._copy_share(view, plan, plan.generation)
        if view.sequence != sequence:
            return  # the writer did not wait, and has begun the next update
        self._offered_age = age
        for portion in portions:
            saver.offer(portion)

    def _last_portions(self) -> list[Portion]:
        """Return this node's part of the last state; see the base class."""
        views = [
            mapped.view
            for mapped in self._mapped.values()
            if mapped.view.generation and mapped.view.is_complete
        ]
        plan = self._plan
        views += [self._left_arena[1]] if self._left_arena is not None else []
        if plan is None or not views or all(member.node != self._node for member in plan.members):
            return []
        return self._copy_share(max(views, key=_age), plan, plan.generation, last=True)

    def _is_due(self, view: ArenaView, saver: Saver) -> bool:
        """Return True if the present generation has committed this state and it is to be stored."""
        if self._plan is None or view.generation != self._plan.generation:
            return False
        if (
            view.generation != self._due_generation
        ):  # the state with which a generation begins is not new
            self._due_generation, self._offered_age = view.generation, (view.step, view.generation)
        return (view.step, view.generation) > self._offered_age and saver.due.is_due(view.step)

    def _copy(self, mapped: _MappedWorker) -> None:
        """Copy the committed state if the budget wants it, or the script has changed it since.

        Training never waits long for it.
        """
        step, has_copy = mapped.view.step, self._has_copy(mapped.view.step)
        # the script may have written into the state after it was copied
        is_stale = has_copy and self._copied_sequence != mapped.view.sequence
        if not self._budget.wants(step, mapped.view.generation, time.monotonic()) and not is_stale:
            return
        if has_copy and not is_stale:  # a new generation begins with the same state
            self._budget.copied(step, None)
        elif not self._try_to_copy(mapped.view, step):
            return
        self._report_interval(step, mapped.view.generation)

    def _has_copy(self, step: int) -> bool:
        """Return True if the memory tier has a copy of this step from the present source."""
        return self._copied_of == self._source and any(
            copy.seal.step == step for copy in self._tier.copies()
        )

    def _try_to_copy(self, view: ArenaView, step: int) -> bool:
        """Copy a state, and give the outcome to the budget. Return True if that succeeded.

        A failure is recorded in the journal, and never stops training.
        """
        sequence = view.sequence
        # not wall time: a thread that waits for a CPU takes none from training
        began_s = time.thread_time()
        try:
            sealed = self._tier.save(view)
        except Exception as error:  # noqa: BLE001 - training goes on without this copy
            self._budget.failed(step)
            reason = reason_of(error)
            self._journal.write(Event.COPY_FAILED, worker=self._source, step=step, reason=reason)
            return False
        self._copied_of, self._copied_sequence = self._source, sequence
        self._budget.copied(sealed.step, time.thread_time() - began_s)
        return True

    def _report_interval(self, step: int, generation: int) -> None:
        """Record in the journal the interval between copies, if it has changed."""
        budget = self._budget
        if (generation, budget.every) == self._reported_interval:
            return
        self._reported_interval = generation, budget.every
        self._journal.write(
            Event.COPY_INTERVAL,
            worker=self._source,
            step=step,
            generation=generation,
            every=budget.every,
            step_ms=round(1e3 * budget.step_s, 3),
            cost_ms=round(1e3 * budget.cost_s, 3),
        )

    # -- acts of faults on copies ------------------------------------------------------------------

    def kept_copies(self, worker: str) -> list[KeptCopy]:
        """Return the newest copy; see the base class.

        The arena of an ended worker is not a copy.
        """
        copies = self._tier.copies() if worker == self._copied_of else []
        return [
            KeptCopy(worker, "memory", seal, f"/proc/self/fd/{view.fd}", in_header=False)
            for seal, view in copies
        ]

    def lacks_copy(self, worker: str, step: int) -> bool:
        """Return True if the budget has not decided on this step yet.

        Always False for a worker whose commits are not copied here.
        """
        return worker == self._source and self._budget.seen < step

    def drop_copies(self, copies: list[KeptCopy]) -> None:
        """Drop all copies of the memory tier, unless ``copies`` is empty."""
        if copies:
            self._tier = MemoryTier(self.breakpoints.reach)

    # -- states that outlive workers ---------------------------------------------------------------

    def _ended(self, worker: str) -> None:
        """Keep the arena of an ended worker if its state is complete and the newest.

        Record in the journal if the worker ended in the middle of an update.
        """
        mapped = self._mapped.pop(worker, None)
        self._source = "" if worker == self._source else self._source
        self._stored_from = "" if worker == self._stored_from else self._stored_from
        if mapped is None:
            return
        os.close(mapped.board.bell)
        if not mapped.view.generation or mapped.view.step < 0:
            return  # it never had the state of the training, or has dropped it
        if mapped.view.sequence % 2 or not mapped.view.is_complete:
            self._record_torn(worker, mapped)
            return
        if self._left_arena is None or _age(self._left_arena[1]) <= _age(mapped.view):
            self._left_arena = worker, mapped.view

    def _record_torn(self, worker: str, mapped: _MappedWorker) -> None:
        """Record in the journal that a worker ended in the middle of an update.

        A worker that was copying a newer state is not recorded.

        A worker may also end between two steps, in code that writes into the state. Then the last
        step counts as not committed.
        """
        if mapped.view.generation == mapped.board.generation:
            step, generation = mapped.board.step, mapped.view.generation
            if not mapped.view.sequence % 2:
                step -= 1
            self._journal.write(Event.TORN, worker=worker, step=step, generation=generation)

    def _forget_older(self, step: int) -> None:
        """Release the arena of an ended worker if it is older than ``step``."""
        if self._left_arena is not None and self._left_arena[1].step < step:
            self._left_arena = None
            self._offers.withdraw([])

    def _recall(self, number: int) -> None:
        """Seal and serve the arena of an ended worker, serve the copies, and send the list.

        An arena that cannot be sealed is recorded in the journal and left out.
        """
        raise_priority()  # a recovery waits for this
        copies = [(self._copied_of, copy) for copy in self._tier.copies()]
        if self._left_arena is not None:
            worker, view = self._left_arena
            try:
                copies.append((worker, Copy(seal(view), view)))
            except (Torn, Poisoned) as error:  # not Torn in practice: the writer has ended
                reason = reason_of(error)
                self._journal.write(Event.COPY_FAILED, worker=worker, step=view.step, reason=reason)
        self._offers.withdraw([copy.view for _, copy in copies])
        snapshots: tuple[OfferedSnapshot, ...] = ()
        # without a descriptor or port for a server, other nodes may have copies
        with contextlib.suppress(OSError):
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
        self._archive.answer(Sealed(self._node, snapshots, number), self._send_message)
        lower_priority(self._niceness)


def _age(view: ArenaView) -> tuple[int, int]:
    """Return step and generation of a state."""
    return view.step, view.generation
