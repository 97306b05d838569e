"""What ends a step of a sharded job on this rank: its pieces are updated, or the batch is skipped; and copies begin."""

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
        writes: whether a state counts only once the next transaction is entered.
        number: of the piece.
        check: of what replicas of the piece compare.

    Attributes:
        awaits_entry: the copy of the newest state begins when the next transaction is entered.
    """

    def __init__(
        self,
        worker: WorkerContext,
        copies: Copies,
        writes: ScriptWrites,
        state: ShardedState,
        number: int,
        check: PieceCheck,
    ) -> None:
        self._worker, self._copies, self._writes = worker, copies, writes
        self._state, self._number, self._check = state, number, check
        self.awaits_entry = False
        self._stall_ms = 0.0  # for copies of the state, before the newest commit

    def commit(self, formation: Formation, rows: Sequence[Row]) -> None:
        """Run the optimizers on the reduced gradients.

        Args:
            rows: what each rank has said of the step.

        Raises:
            GenerationSuperseded: if another generation was begun before. LeaseOver: if others may train instead.
        """
        loss = _mean_loss(rows)

        def act() -> None:
            with self._state.running_optimizers():
                self._state.advance()
            self._run_after_update()
            self._check.updated()
            self._worker.hooks.injected.updated()
            self._worker.journal.write(
                Event.COMMIT,
                step=self._state.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                loss=loss,
                piece=self._number,
                grad_sum=sum(row.digest for row in rows) % DIGEST,
                stall_ms=self._stall_ms,
            )

        self._advance(formation, act, loss)

    def skip(self, formation: Formation, shards: Sequence[int], samples: Sequence[int]) -> None:
        """Policy ``skip``: the step counts, its batch is written down as skipped, the weights stay.

        Args:
            shards: of which the numbers are not finite.
            samples: of all shards of this rank.

        Raises:
            GenerationSuperseded: if another generation was begun before. LeaseOver: if others may train instead.
        """

        def act() -> None:
            self._worker.journal.write(
                Event.SKIP,
                step=self._state.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                shards=shards,
                samples=samples,
            )

        self._advance(formation, act, float("nan"))

    def _advance(self, formation: Formation, act: Callable[[], None], loss: float) -> None:
        worker, state = self._worker, self._state
        began_ns = time.monotonic_ns()
        self._copies.wait()
        self._stall_ms = round((time.monotonic_ns() - began_ns) / 1e6, 3)
        if (
            worker.board.lease_over
        ):  # this process, or its whole node, stood still: its agent will end it
            raise LeaseOver("the lease of this node has run out")
        with worker.regrouper.advance(formation):
            act()
            state.step += 1
            worker.regrouper.step = state.step
        state.forget_gradients()
        self.awaits_entry = self._writes.at_entry
        if not self.awaits_entry:
            self._copies.begin(state.step, formation.plan.generation)
        worker.board.progress(state.step, loss)

    def _run_after_update(self) -> None:
        state, config = self._state, self._worker.config
        if state.after_update:
            seed_everything(
                config.seed, state.step, config.shard_count
            )  # behind the seeds of the shards
            state.run_after_update()


def _mean_loss(rows: Sequence[Row]) -> float:
    """Over all shards, in their order: the same bits on every rank."""
    found = [
        next(loss for row in rows if (loss := row.losses[shard]) is not None)
        for shard in range(len(rows[0].losses))
    ]
    return sum(found) / len(found)
