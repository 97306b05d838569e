"""What the keepers of all jobs have in common: orders, bells of workers, a thread that serves both, and the tiers."""

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
from chaoskit.daemon.injection import DaemonActs, KeepsCopies
from chaoskit.daemon.saving import Saver
from chaoskit.daemon.snapshot_server import Offers, Orders, start_thread
from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.process.linux import await_readable, may_raise_priority
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import ActReport, Endpoint, Holding, InjectionAct, Message, Plan


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Where a keeper works, and whom it tells.

    Args:
        host: address under which other nodes reach this one.
        config: says how many nodes copy each committed state, and which stand together.
        tell: takes a message to the coordinator; called on threads of the keeper.
        fail: called there with an error that the keeper cannot live with; after that nothing is kept.
        report: takes what an act did to the harness that ordered it; called there, too; a run without faults has none.
    """

    node: str
    host: str
    token: str
    config: RunConfig
    journal: Journal
    tell: Callable[[Message], None]
    fail: Callable[[BaseException], None]
    report: Callable[[ActReport], None] = lambda report: None


class NodeKeeper(KeepsCopies, ABC):
    """Takes orders for one node, which return at once. They are carried out one after the other, on a thread.

    Args:
        niceness: of the thread, while nothing waits for it. 0 is taken where a thread may not come back from it: a
            recovery that waits behind training costs more than copies that are made beside it.
    """

    def __init__(self, context: NodeContext, niceness: int) -> None:
        self._node, self._config = context.node, context.config
        self._journal, self._tell, self._fail = context.journal, context.tell, context.fail
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
        """To be called when the keeper is complete."""
        start_thread(self._serve, self._fail, self._niceness)

    # -- orders ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """A worker is ready: keep what it has to keep. Its board, and the bell, belong to the keeper from here on."""

    @abstractmethod
    def hold(self, holding: Holding) -> None:
        """A worker copies its piece of a sharded state into slots: have them open, too."""

    @abstractmethod
    def went_on(self, step: int) -> None:
        """A live worker of this node has committed ``step`` steps: let go what others left and nobody can use."""

    def follow(self, plan: Plan) -> None:
        """A membership: who copies whose state now."""
        self._orders.give(lambda: self._follow(plan))

    def ended(self, worker: str) -> None:
        """No code of the worker runs any more: what it left is kept."""
        self._orders.give(lambda: self._ended(worker))

    def recall(self, number: int = 0) -> None:
        """Tell the coordinator what can be read."""
        self._orders.give(lambda: self._recall(number))

    def carry_out(self, fault: str, act: InjectionAct) -> None:
        """A fault wants something done to the copies that are kept here."""
        self._orders.give(lambda: self._acts.carry_out(self, fault, act))

    def store(self, step: int) -> None:
        """Store the state after ``step`` steps, too: when it is committed, or now if it is here."""
        if self._archive.saver is not None:
            self._orders.give(partial(self._store, self._archive.saver, step))

    def _store(self, saver: Saver, step: int) -> None:
        saver.due.order(step)
        self._save_present(saver, step)

    def finish(self, timeout_s: float, *, last: bool, workers: tuple[str, ...]) -> None:
        """The job is over. Waits.

        Args:
            timeout_s: what is being stored has so long to get there.
            last: it has as long as it takes instead, and the state with which the job ended is stored, too.
            workers: those of this node that were there at the end.
        """
        saver = self._archive.saver
        if saver is None or not last:
            self._archive.finish(timeout_s)
            return
        offered: SimpleQueue[list[Portion]] = SimpleQueue()
        self._orders.give(lambda: offered.put(self._offer_last(saver, workers)))
        self._archive.finish_last(leads=any(portion.leads for portion in offered.get()))

    def _offer_last(self, saver: Saver, workers: tuple[str, ...]) -> list[Portion]:
        """Offer this node's part; nothing where it has no member any more, and knows an old plan only."""
        members = self._plan.members if self._plan is not None else ()
        portions = self._last() if any(member.worker in workers for member in members) else []
        for portion in portions:
            saver.offer(portion)
        return portions

    def _refuse(self, step: int, error: Exception) -> None:
        """A part of a state cannot be stored."""
        self._journal.write(Event.SAVE_FAILED, step=step, tier="disk", reason=str(error))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            bells = self._bells()
            readable = await_readable([self._orders.wake, *bells])
            if (
                self._orders.wake in readable
            ):  # first: what is ordered may be on the way of a recovery
                self._orders.carry_out()
                continue
            for bell in readable:
                os.eventfd_read(bell)
                bells[bell]()

    @abstractmethod
    def _bells(self) -> dict[int, Callable[[], None]]:
        """Descriptors to listen to, with what to do when they ring."""

    @abstractmethod
    def _follow(self, plan: Plan) -> None: ...

    @abstractmethod
    def _ended(self, worker: str) -> None: ...

    @abstractmethod
    def _recall(self, number: int) -> None: ...

    @abstractmethod
    def _save_present(self, saver: Saver, step: int) -> None:
        """Offer this node's part of the state after ``step`` steps, if live workers hold that state now."""

    @abstractmethod
    def _last(self) -> list[Portion]:
        """This node's part of the state with which the job has ended, as ended workers have left it.

        Its age is the step, and the newest membership: that is the same on all nodes.
        """
