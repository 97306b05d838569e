"""The commit of a step on one rank of a sharded job: update or skip, then copy the state.

-> integrity/ballot.py: the agreement of all ranks before; state/copies.py: the copies in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.ballot import DIGEST, Row
from chaoskit.runtime.integrity.piece_check import PieceCheck
from chaoskit.runtime.state.copies import Copies
from chaoskit.runtime.state.sampling import seed_everything
from chaoskit.runtime.state.script_writes import ScriptWrites
from chaoskit.runtime.state.sharding import ShardedState
from chaoskit.runtime.step.commit import LeaseOver
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.vocabulary import Event


class ShardedCommitter:
    """Moves the piece of one rank to the next step.

    Args:
        writes: shows whether a state is valid only once the next transaction is entered.
        piece_number: the number of the piece.
        piece_check: the comparison of the replicas of the piece.

    Attributes:
        awaits_entry: True if the copy of the newest state begins when the next transaction is
            entered.
    """

    def __init__(
        self,
        worker: WorkerContext,
        copies: Copies,
        writes: ScriptWrites,
        state: ShardedState,
        piece_number: int,
        piece_check: PieceCheck,
    ) -> None:
        self._worker, self._copies, self._writes = worker, copies, writes
        self._state, self._piece_number, self._piece_check = state, piece_number, piece_check
        self.awaits_entry = False
        self._stall_ms = 0.0  # the newest commit waited so long for copies of the state

    def commit(self, formation: Formation, rows: Sequence[Row]) -> None:
        """Run the optimizers on the reduced gradients, and begin a copy of the new state.

        The commit waits for the copy of the former state. The new copy begins at the next
        transaction instead if the script writes into the state.

        Args:
            rows: the report of each rank on the step.

        Raises:
            GenerationSuperseded: if another generation was begun before.
            LeaseOver: if the lease of this node has run out, so that others may train instead.
        """
        loss = _mean_loss(rows)

        def take_step() -> None:
            with self._state.running_optimizers():
                self._state.advance()
            self._run_after_update()
            self._piece_check.updated()
            self._worker.hooks.injected.updated()
            self._worker.journal.write(
                Event.COMMIT,
                step=self._state.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                loss=loss,
                piece=self._piece_number,
                grad_sum=sum(row.digest for row in rows) % DIGEST,
                stall_ms=self._stall_ms,
            )

        self._advance(formation, take_step, loss)

    def skip(self, formation: Formation, shards: Sequence[int], samples: Sequence[int]) -> None:
        """Skip the batch (policy ``skip``): the number of steps grows by one, and the weights stay.

        Optimizers, schedulers and the functions of ``after_update`` do not run. The state is copied
        as after a commit.

        Args:
            shards: the shards with numbers that are not finite.
            samples: the samples of all shards of this rank.

        Raises:
            GenerationSuperseded: if another generation was begun before.
            LeaseOver: if the lease of this node has run out, so that others may train instead.
        """

        def take_step() -> None:
            self._worker.journal.write(
                Event.SKIP,
                step=self._state.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                shards=shards,
                samples=samples,
            )

        self._advance(formation, take_step, float("nan"))

    def _advance(self, formation: Formation, take_step: Callable[[], None], loss: float) -> None:
        """Wait for the copies, and run ``take_step`` while newer generations wait for the step.

        Copies of the new state are begun now, or when the next transaction is entered. Gradients
        are dropped, and the new step is shown on the board.

        Raises:
            GenerationSuperseded, LeaseOver: as :meth:`commit`.
        """
        worker, state = self._worker, self._state
        began_ns = time.monotonic_ns()
        self._copies.wait()
        self._stall_ms = round((time.monotonic_ns() - began_ns) / 1e6, 3)
        if worker.board.lease_over:  # the process or its node was stopped too long
            raise LeaseOver("the lease of this node has run out")
        with worker.regrouper.advance(formation):
            take_step()
            state.step += 1
            worker.regrouper.step = state.step
        state.forget_gradients()
        self.awaits_entry = self._writes.at_entry
        if not self.awaits_entry:
            self._copies.begin(state.step, formation.plan.generation)
        worker.board.progress(state.step, loss)

    def _run_after_update(self) -> None:
        """Call the job's functions for the end of an update, with the same seed on all ranks."""
        state, config = self._state, self._worker.config
        if state.after_update:
            seed_everything(config.seed, state.step, config.shard_count)  # after the shards
            state.run_after_update()


def _mean_loss(rows: Sequence[Row]) -> float:
    """Return the mean loss over all shards, added in their order: the same bits on every rank."""
    losses = [
        next(loss for row in rows if (loss := row.losses[shard]) is not None)
        for shard in range(len(rows[0].losses))
    ]
    return sum(losses) / len(losses)
