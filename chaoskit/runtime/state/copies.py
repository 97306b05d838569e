"""A worker's part of the fast tiers: each committed state of its piece, in slots of memory that its agent maps, too."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from chaoskit.checkpoint.layout.boundaries import Hook
from chaoskit.checkpoint.layout.held import lay_out
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.journal import Journal
from chaoskit.process.heartbeat_page import Board
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Holding, Message

_ACK_WAIT_S = 0.25  # for copies on peers, which have had a whole step; then training goes on with one step more to lose
_LOOK_S = 0.0005
_LAST_WAIT_S = (
    10.0  # for a slot for the copy of the last step, which nothing waits for but the store
)
_LAST_LOOK_S = 0.1
_UNEVEN = 1.05  # a piece that has more of the rows than others


class Copies:
    """The slots outlive the entries of a train function; what is copied into them changes with each entry.

    Attributes:
        kept: the newest step of which every piece is known to have all its copies; -1 for none.

    Args:
        worker: its name.
        send: takes a message to the agent.
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.MEMORY`.
    """

    def __init__(
        self, worker: str, board: Board, journal: Journal, send: Callable[[Message], None], at: Hook
    ) -> None:
        self._worker, self._board, self._journal, self._send, self._at = (
            worker,
            board,
            journal,
            send,
            at,
        )
        self._slots = Slots()
        self.kept = -1
        self._state: ShardedState | None = None
        self._piece = (0, 1)
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._told: Holding | None = None
        self._tensors: list[
            int
        ] = []  # that are copied: one that the optimizer made, or replaced, is another object
        self._snapshotter: Snapshotter | None = None

    def reserve(self, state: ShardedState, world: int) -> None:
        """Make room for one of ``world`` pieces of a state that is here as a whole, while no rank waits for it."""
        _, size_bytes = lay_out(state.held())
        with contextlib.suppress(OSError, MemoryError):  # it is tried again when it is needed
            self._slots.reserve(int(size_bytes / world * _UNEVEN))

    def hold(self, state: ShardedState, number: int, count: int) -> None:
        """Copy this state from now on: piece ``number`` of ``count`` different ones."""
        self.drop()
        self._state, self._piece, self._groups = state, (number, count), state.groups()
        self._tensors = _identities(state)
        self._snapshotter = Snapshotter(
            self._slots,
            state.held(),
            state.scalars,
            check_finite=True,
            sealed=self._sealed,
            dropped=self._dropped,
            probe=self._at,
        )
        self._tell()

    def drop(self) -> None:
        """Copy nothing any more. What is in the slots stays."""
        snapshotter, self._snapshotter, self._state = self._snapshotter, None, None
        if snapshotter is not None:
            snapshotter.close()

    def begin(self, step: int, generation: int) -> None:
        """The state of ``step`` steps stands. It must not change before :meth:`wait` has returned."""
        assert self._snapshotter is not None
        assert self._state is not None
        now = _identities(self._state)
        if now != self._tensors:
            self._tensors = now
            self._snapshotter.rebind(self._state.held())
            self._tell()
        self._snapshotter.begin(step, generation)

    def wait(self) -> None:
        """Until the state may change."""
        assert self._snapshotter is not None
        self._snapshotter.wait()

    def complete(self, step: int, generation: int, over: Callable[[], bool]) -> None:
        """Have a copy of the last step, if there is none because others still read what it would have replaced.

        Args:
            over: whether it is not wanted any more.
        """
        assert self._snapshotter is not None
        deadline_s = time.monotonic() + _LAST_WAIT_S
        while (newest := self._snapshotter.settle()) is None or newest.step != step:
            if over() or time.monotonic() > deadline_s:
                return
            time.sleep(_LAST_LOOK_S)
            self._snapshotter.begin(step, generation)

    def go_back(self, step: int) -> None:
        """Training goes on from ``step``: copies of what came after it count no more."""
        assert self._snapshotter is not None
        self._snapshotter.forget_after(step)

    def keep(self, step: int) -> None:
        """Every piece of ``step`` has all its copies: it is kept until another one is named; -1 for none."""
        assert self._snapshotter is not None
        self.kept = step
        self._snapshotter.protected(step)
        self._board.keep(step)

    def protected(self, step: int, over: Callable[[], bool]) -> int:
        """The newest step of which this piece has all its copies; waits a moment for ``step`` if it is not ``over``."""
        deadline_s = time.monotonic() + _ACK_WAIT_S
        while self._board.protected < step and not over() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self._board.protected

    def _tell(self) -> None:
        """The agent must know what to map, and what it is a part of."""
        number, count = self._piece
        holding = Holding(self._worker, os.getpid(), self._slots.fds, number, count, self._groups)
        if holding != self._told:
            self._told = holding
            self._send(holding)

    def _sealed(self, seal: Seal) -> None:
        os.eventfd_write(self._board.bell, 1)

    def _dropped(self, step: int, reason: str) -> None:
        self._journal.write(Event.COPY_FAILED, worker=self._worker, step=step, reason=reason)


def _identities(state: ShardedState) -> list[int]:
    return [id(tensor) for _, tensor in state.tensors()]
