"""A worker's part of the fast tiers: copies of its piece of each committed state in memory.

The keeper of the node maps the slots of memory, too, so the copies outlive the worker.

-> daemon/piece_keeper.py sends each copy to other nodes. checkpoint/memory/snapshotter.py makes
it. integrity/ballot.py (``whole_step``): the step of which every piece has all copies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaoskit.checkpoint.layout.boundaries import Hook
from chaoskit.checkpoint.layout.held import lay_out
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.checkpoint.memory.slots import Slots
from chaoskit.checkpoint.memory.snapshotter import Snapshotter
from chaoskit.journal import Journal
from chaoskit.process.progress_board import Board
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.vocabulary import Event
from chaoskit.wire.messages import Holding, Message

_ACK_WAIT_S = 0.25  # for copies on peers, which had a whole step; then one more step can be lost
_LOOK_S = 0.0005
_LAST_WAIT_S = 10.0  # for a slot for the copy of the last step
_LAST_LOOK_S = 0.1
_UNEVEN = 1.05  # a piece may have more rows than others


@dataclass(slots=True)
class _HeldState:
    """The state that is copied during one entry.

    Attributes:
        tensors: identities of its tensors, which an optimizer may replace.
    """

    state: ShardedState
    snapshotter: Snapshotter
    tensors: list[int]


class Copies:
    """The copies of a rank's piece of the state.

    The slots outlive the entries of a train function. The state that is copied into them changes
    with each entry. A copy that fails is journalled, and costs only that copy.

    There is no state before :meth:`hold` and after :meth:`drop`: methods that need one then raise
    RuntimeError.

    Attributes:
        kept: the newest step of which every piece has all its copies; -1 for none.

    Args:
        worker: the name of the worker.
        send: sends a message to the agent.
        at_boundary: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.MEMORY`.
    """

    def __init__(
        self,
        worker: str,
        board: Board,
        journal: Journal,
        send: Callable[[Message], None],
        at_boundary: Hook,
    ) -> None:
        self._worker = worker
        self._board = board
        self._journal = journal
        self._send = send
        self._at = at_boundary
        self._slots = Slots()
        self.kept = -1
        self._held_state: _HeldState | None = None
        self._piece = (0, 1)
        self._groups: tuple[tuple[int, ...], ...] = ()
        self._reported_holding: Holding | None = None

    def reserve(self, state: ShardedState, world: int) -> None:
        """Reserve memory for one of ``world`` pieces of a state that is whole here.

        It is called while no rank waits for this one. A lack of memory is ignored here.
        """
        _, size_bytes = lay_out(state.held())
        with contextlib.suppress(OSError, MemoryError):  # tried again when the memory is needed
            self._slots.reserve(int(size_bytes / world * _UNEVEN))

    def hold(self, state: ShardedState, piece_number: int, piece_count: int) -> None:
        """Copy this state from now on, as piece ``piece_number`` of ``piece_count`` different ones.

        Each copy is made by :meth:`begin`. The agent gets a report of the memory that holds the
        copies.

        Raises:
            BadInput: if a tensor of the state cannot be copied byte by byte.
        """
        self.drop()
        self._piece, self._groups = (piece_number, piece_count), state.groups()
        snapshotter = Snapshotter(
            self._slots,
            state.held(),
            state.scalars,
            check_finite=True,
            on_sealed=self._sealed,
            on_dropped=self._dropped,
            probe=self._at,
        )
        self._held_state = _HeldState(state, snapshotter, _identities(state))
        self._report_holding()

    def drop(self) -> None:
        """Stop copying. The slots keep their content."""
        held, self._held_state = self._held_state, None
        if held is not None:
            held.snapshotter.close()

    @property
    def _current(self) -> _HeldState:
        """The state that is held.

        Raises:
            RuntimeError: before :meth:`hold`, and after :meth:`drop`.
        """
        if self._held_state is None:
            raise RuntimeError("no state is held: call hold() first")
        return self._held_state

    def begin(self, step: int, generation: int) -> None:
        """Begin a copy of the state of ``step``.

        The copy is made in a thread: the state must not change before :meth:`wait` has returned.
        """
        held = self._current
        identities = _identities(held.state)
        if identities != held.tensors:
            held.tensors = identities
            held.snapshotter.rebind(held.state.held())
            self._report_holding()
        held.snapshotter.begin(step, generation)

    def wait(self) -> None:
        """Wait until the copy in progress has read the state, so that the state may change."""
        self._current.snapshotter.wait()

    def complete(self, step: int, generation: int, is_over: Callable[[], bool]) -> None:
        """Make a copy of the last step if there is none.

        It is missing if other processes were reading the slot that it needed. Return without a copy
        after 10 seconds.

        Args:
            is_over: returns True if the copy is no longer needed.
        """
        snapshotter = self._current.snapshotter
        deadline_s = time.monotonic() + _LAST_WAIT_S
        while (newest := snapshotter.settle()) is None or newest.step != step:
            if is_over() or time.monotonic() > deadline_s:
                return
            time.sleep(_LAST_LOOK_S)
            snapshotter.begin(step, generation)

    def go_back(self, step: int) -> None:
        """Drop copies of later steps, as training goes on from ``step``."""
        self._current.snapshotter.forget_after(step)

    def keep(self, step: int) -> None:
        """Keep the copies of ``step`` until another step is named; -1 for none.

        Every piece of that step has all its copies.
        """
        snapshotter = self._current.snapshotter
        self.kept = step
        snapshotter.protect(step)
        self._board.keep(step)

    def protected_step(self, step: int, is_over: Callable[[], bool]) -> int:
        """Return the newest step of which this piece has all its copies; -1 for none.

        Wait for ``step``, at most 0.25 s and until ``is_over`` returns True.
        """
        deadline_s = time.monotonic() + _ACK_WAIT_S
        while self._board.protected < step and not is_over() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        return self._board.protected

    def _report_holding(self) -> None:
        """Report the memory to map, and the piece that it holds, to the agent for its keeper.

        A report that repeats the last one is not sent.
        """
        piece_number, piece_count = self._piece
        holding = Holding(
            self._worker, os.getpid(), self._slots.fds, piece_number, piece_count, self._groups
        )
        if holding != self._reported_holding:
            self._reported_holding = holding
            self._send(holding)

    def _sealed(self, seal: Seal) -> None:
        """Wake the keeper of the node, which reads the new copy."""
        os.eventfd_write(self._board.bell, 1)

    def _dropped(self, step: int, reason: str) -> None:
        """Journal that a copy of ``step`` was not made."""
        self._journal.write(Event.COPY_FAILED, worker=self._worker, step=step, reason=reason)


def _identities(state: ShardedState) -> list[int]:
    """Return the identity of each tensor, which shows that an optimizer has replaced it."""
    return [id(tensor) for _, tensor in state.tensors()]
