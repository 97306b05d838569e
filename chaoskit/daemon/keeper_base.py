"""Base of the keepers of all jobs: orders, events of workers, a thread for both, and tiers.

-> ``daemon/replica_keeper.py`` and ``daemon/piece_keeper.py``: which states are kept, and how.
-> ``daemon/process.py``: the process in which a keeper runs. ``daemon/archive.py``: stored tiers.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from chaoskit.checkpoint.disk.breakpoints import Breakpoints
from chaoskit.checkpoint.disk.portion import Portion
from chaoskit.config import RunConfig
from chaoskit.daemon.archive import Archive
from chaoskit.daemon.copy_faults import KeptCopy
from chaoskit.daemon.injection import DaemonActs
from chaoskit.daemon.saving import Saver
from chaoskit.daemon.snapshot_server import Offers, Orders, start_thread
from chaoskit.journal import Journal
from chaoskit.process.linux import await_readable, may_raise_priority
from chaoskit.process.progress_board import Board
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import ActReport, Endpoint, Holding, InjectionAct, Message, Plan


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The node of a keeper, and its callbacks.

    Args:
        node: name of the node.
        host: address under which other nodes reach this one.
        token: secret that authenticates connections.
        config: settings of the run, such as the number of copies and the racks.
        journal: journal of the node.
        send: sends a message to the coordinator; called on threads of the keeper.
        fail: called there with an error after which the keeper cannot go on.
        report: sends the outcome of an act to the harness; called there, too, and only with faults.
    """

    node: str
    host: str
    token: str
    config: RunConfig
    journal: Journal
    send: Callable[[Message], None]
    fail: Callable[[BaseException], None]
    report: Callable[[ActReport], None] = lambda report: None


class NodeKeeper(ABC):
    """The keeper of one node. Orders return at once and are carried out one by one on a thread.

    Args:
        context: the node, and the callbacks of the keeper.
        niceness: niceness of the thread while nothing waits for it. It stays 0 where a thread may
            not raise its priority again: a recovery that waits behind training costs more than
            copies beside it.
    """

    def __init__(self, context: NodeContext, niceness: int) -> None:
        self._node, self._config = context.node, context.config
        self._journal, self._send_message, self._fail = context.journal, context.send, context.fail
        self._niceness = niceness if may_raise_priority() else 0
        self._plan: Plan | None = None
        self._offers = Offers(context.node, context.host, context.token)
        self._orders = Orders()
        self._acts = DaemonActs(context.node, context.report)
        self.breakpoints = Breakpoints()
        at = self.breakpoints.reach
        self._archive = Archive(
            context.node, context.token, context.config, context.journal, context.fail, at
        )

    def _start(self) -> None:
        """Start the thread. Call this when the keeper is complete."""
        start_thread(self._serve, self._fail, self._niceness)

    # -- orders ------------------------------------------------------------------------------------

    @abstractmethod
    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """Keep the state of a worker that is ready.

        Args:
            worker: name of the worker.
            endpoint: process and descriptor of its arena, if it has one.
            board: its progress board, which the keeper owns from now on, with its event.
        """

    @abstractmethod
    def hold(self, holding: Holding) -> None:
        """Open the slots into which a worker copies its piece of a sharded state.

        The descriptors in ``holding`` may be closed after this returns.
        """

    @abstractmethod
    def went_on(self, step: int) -> None:
        """Release old states of lost workers: a live worker has committed ``step`` steps."""

    def follow(self, plan: Plan) -> None:
        """Queue a new plan for the thread, which chooses sources or partners of copies by it."""
        self._orders.give(lambda: self._follow(plan))

    def ended(self, worker: str) -> None:
        """Queue the end of a worker: its state is kept if it is complete."""
        self._orders.give(lambda: self._ended(worker))

    def recall(self, number: int = 0) -> None:
        """Queue an order to send the coordinator a list of all copies.

        Args:
            number: number of the coordinator's question, which the answer repeats.
        """
        self._orders.give(lambda: self._recall(number))

    def carry_out(self, fault: str, act: InjectionAct) -> None:
        """Queue an act of a fault on copies. Its outcome is passed to ``report``."""
        self._orders.give(lambda: self._acts.carry_out(self, fault, act))

    @abstractmethod
    def kept_copies(self, worker: str) -> list[KeptCopy]:
        """Return the complete copies of ``worker``'s state or piece, in all tiers of the node."""

    @abstractmethod
    def lacks_copy(self, worker: str, step: int) -> bool:
        """Return True if an act on copies of this step must wait, because they are on their way."""

    @abstractmethod
    def drop_copies(self, copies: list[KeptCopy]) -> None:
        """Drop the given copies, so that no restore can use them."""

    def store(self, step: int) -> None:
        """Store the state after ``step`` steps, too, now or as soon as it is committed.

        Does nothing in a job without a disk tier.
        """
        if self._archive.saver is not None:
            self._orders.give(partial(self._store, self._archive.saver, step))

    def _store(self, saver: Saver, step: int) -> None:
        """Add a step to those that are due, and offer its state if it is present."""
        saver.due.order(step)
        self._save_present(saver, step)

    def finish(self, timeout_s: float, *, last: bool, workers: tuple[str, ...]) -> None:
        """Wait for saves and uploads under way, because the job is over. Blocks the caller.

        Args:
            timeout_s: time limit of both together.
            last: wait for as long as data is written or sent instead, and store the state with
                which the job ended. Has no effect in a job without a disk tier.
            workers: workers of this node at the end of the job.
        """
        saver = self._archive.saver
        if saver is None or not last:
            self._archive.finish(timeout_s)
            return
        offered: SimpleQueue[list[Portion]] = SimpleQueue()
        self._orders.give(lambda: offered.put(self._offer_last(saver, workers)))
        self._archive.finish_last(saver, leads=any(portion.leads for portion in offered.get()))

    def _offer_last(self, saver: Saver, workers: tuple[str, ...]) -> list[Portion]:
        """Offer this node's part of the last state for storing, and return it.

        Return [] if the plan has none of ``workers``.
        """
        members = self._plan.members if self._plan is not None else ()
        portions = (
            self._last_portions() if any(member.worker in workers for member in members) else []
        )
        for portion in portions:
            saver.offer(portion)
        return portions

    def _record_failure(self, step: int, error: Exception) -> None:
        """Record in the journal that a part of a state cannot be stored."""
        self._journal.write(Event.SAVE_FAILED, step=step, tier="disk", reason=str(error))

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Carry out orders, and call the handlers of workers' events. Does not return."""
        while True:
            handlers = self._event_handlers()
            readable = await_readable([self._orders.wake, *handlers])
            if self._orders.wake in readable:  # orders first, because a recovery may wait for one
                self._orders.carry_out()
                continue
            for event_fd in readable:
                os.eventfd_read(event_fd)
                handlers[event_fd]()

    @abstractmethod
    def _event_handlers(self) -> dict[int, Callable[[], None]]:
        """Return the handler of each event descriptor of a worker that the thread waits for."""

    @abstractmethod
    def _follow(self, plan: Plan) -> None:
        """Take over a plan, on the keeper's thread; see the subclasses."""

    @abstractmethod
    def _ended(self, worker: str) -> None:
        """Keep or release the state of a worker that has ended, on the keeper's thread."""

    @abstractmethod
    def _recall(self, number: int) -> None:
        """Send the list of all copies to the coordinator, on the keeper's thread."""

    @abstractmethod
    def _save_present(self, saver: Saver, step: int) -> None:
        """Offer this node's part of the state after ``step`` steps, if a live worker has it."""

    @abstractmethod
    def _last_portions(self) -> list[Portion]:
        """Return this node's part of the state with which the job has ended.

        Ended workers have left the state. Its age is its step and the newest generation, so it is
        the same on all nodes.
        """
