"""The agent's part of the fast tiers in a sharded job: the pieces of its workers, and of other nodes' workers.

A worker copies each committed state of its piece into slots of memory; the agent has them open, too, so they outlive
the worker. Nothing is offered until the coordinator asks, which it does when a rank was lost: nobody else has its piece.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from dataclasses import dataclass

from chaoskit.checkpoint.arena import ArenaView
from chaoskit.checkpoint.seal import Seal
from chaoskit.config import RunConfig
from chaoskit.control.offers import NICENESS, Offers, Orders, start_thread
from chaoskit.journal import Journal
from chaoskit.messages import Endpoint, Holding, Message, Plan, Sealed, Snapshot
from chaoskit.osprocess import lower_priority, raise_priority
from chaoskit.runtime.board import Board
from chaoskit.vocabulary import Event


@dataclass(slots=True)
class _Held:
    """The slots of one worker, through descriptors of our own."""

    holding: Holding
    fds: tuple[int, ...]
    bell: int
    board: Board | None  # None: the worker has ended

    def copies(self) -> list[tuple[Seal, ArenaView]]:
        """What is complete in the slots now."""
        found = []
        for fd in self.fds:
            view = ArenaView.open(f"/proc/self/fd/{fd}")
            if checksum := view.checksum:
                found.append((Seal(view.step, view.generation, view.size_bytes, checksum), view))
        return found


class PieceKeeper:
    """Holds and offers pieces. Its methods are called from the agent's event loop and return at once.

    Args:
        tell: takes a message to the coordinator; called on the keeper's thread.
        fail: called on the keeper's thread with an error that it cannot live with; after that nothing is kept.
    """

    def __init__(
        self,
        node: str,
        host: str,
        token: str,
        config: RunConfig,
        journal: Journal,
        tell: Callable[[Message], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._node, self._config, self._journal, self._tell = node, config, journal, tell
        self._held: dict[str, _Held] = {}
        self._boards: dict[str, Board] = {}
        self._newest = 0  # step that a live worker of this node has committed
        self._offers = Offers(node, host, token)
        self._orders = Orders()
        start_thread(self._serve, fail)

    # -- called by the agent --------------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> None:
        """A worker is ready."""
        self._orders.give(lambda: self._boards.update({worker: board}))

    def hold(self, holding: Holding) -> None:
        """A worker copies its piece into slots: have them open, too."""
        with contextlib.suppress(OSError):  # it has ended already
            fds = tuple(os.open(f"/proc/{holding.pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for fd in holding.fds)
            self._orders.give(lambda: self._hold(holding, fds))

    def follow(self, plan: Plan) -> None:
        """A membership."""

    def ended(self, worker: str) -> None:
        """No code of the worker runs any more: what it left is kept."""
        self._orders.give(lambda: self._ended(worker))

    def recall(self) -> None:
        """Tell the coordinator what can be read."""
        self._orders.give(self._recall)

    def went_on(self, step: int) -> None:
        """A live worker of this node has committed ``step`` steps: what others left two steps before is of no use."""
        if step != self._newest:
            self._newest = step
            self._orders.give(lambda: self._forget_older(step))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            bells = {held.bell: held for held in self._held.values() if held.board is not None}
            readable, _, _ = select.select([self._orders.wake, *bells], [], [])
            if self._orders.wake in readable:  # first: what is ordered may be on the way of a recovery
                self._orders.carry_out()
                continue
            for bell in readable:
                os.eventfd_read(bell)
                self._sealed(bells[bell])

    def _hold(self, holding: Holding, fds: tuple[int, ...]) -> None:
        board = self._boards.get(holding.worker)
        if board is None:  # it has ended meanwhile
            _close(fds)
            return
        before = self._held.get(holding.worker)
        bell = before.bell if before is not None else os.dup(board.bell)
        if before is not None:
            _close(before.fds)
        self._held[holding.worker] = _Held(holding, fds, bell, board)
        self._sealed(self._held[holding.worker])  # it may have rung before anybody listened

    def _sealed(self, held: _Held) -> None:
        """A worker has completed a copy."""
        copies = held.copies()
        if copies and held.board is not None:
            held.board.protect(max(seal.step for seal, _ in copies))

    def _ended(self, worker: str) -> None:
        self._boards.pop(worker, None)
        held = self._held.get(worker)
        if held is not None and held.board is not None:
            os.close(held.bell)
            held.board = None
            if not held.copies():
                self._forget(worker)

    def _forget(self, worker: str) -> None:
        _close(self._held.pop(worker).fds)

    def _forget_older(self, step: int) -> None:
        for worker, held in list(self._held.items()):
            if held.board is None and all(seal.step + 1 < step for seal, _ in held.copies()):
                self._forget(worker)

    def _recall(self) -> None:
        raise_priority()  # a recovery waits for this
        found = [(held, seal, view) for held in self._held.values() for seal, view in held.copies()]
        self._offers.withdraw([])
        snapshots: list[Snapshot] = []
        with contextlib.suppress(OSError):  # no descriptor or port for a server: others may have copies
            for held, seal, view in found:
                part = held.holding
                offer = self._offers.offer(part.worker, seal, view, piece=part.piece, pieces=part.pieces)
                snapshots.append(offer)
        for offered in snapshots:
            self._journal.write(
                Event.SEALED,
                worker=offered.worker,
                step=offered.step,
                generation=offered.generation,
                checksum=offered.checksum,
                piece=offered.piece,
            )
        self._tell(Sealed(self._node, tuple(snapshots)))
        lower_priority(NICENESS)


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
