"""The commit of a step on one rank: apply the gradients or skip the batch, and journal it.

-> step/trainer.py: the reduction before; step/inquiry.py: the reasons not to commit.
daemon/replica_keeper.py makes the copies that a commit waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.nonfinite_guard import AuditResult
from chaoskit.runtime.reduction.choice import Reduced
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import seed_everything
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.shardwork import ShardWork
from chaoskit.vocabulary import Event

_COPY_WAIT_S = 0.02  # a copy takes the time of one memory copy, and had a whole step for it
_DUE_COPY_WAIT_S = 0.5  # longer for copies to be stored: if each were overtaken, none would be


class LeaseOver(ConnectionError):
    """The error of a commit after the lease of this node has run out: others may train instead.

    The agent renews it while the coordinator answers (``agent/coordinator_link.py``). The
    error is reported to the coordinator, so that all ranks are planned again if the node comes
    back.
    """


class Committer:
    """Moves the replica of one rank to the next step.

    Args:
        clip_norm: largest 2-norm of the reduced gradient; None leaves it as it is.
    """

    def __init__(
        self, worker: WorkerContext, replica: Replica, work: ShardWork, clip_norm: float | None
    ) -> None:
        self._worker, self._replica, self._work, self._clip_norm = worker, replica, work, clip_norm
        self._stall_ms = 0.0  # the newest commit waited so long for a copy of the state

    def commit(
        self, formation: Formation, reduced: Reduced, ownership: Sequence[Sequence[int]]
    ) -> None:
        """Run the optimizer with the reduced gradients, on which all ranks agree.

        Args:
            ownership: the shards of each rank.

        Raises:
            GenerationSuperseded: if another generation was begun before.
            LeaseOver: if the lease of this node has run out, so that others may train instead.
            BadInput: if ranks froze different parameters, or shards left different values in an
                integer buffer.
        """
        loss, own_shards = _mean_loss(reduced, ownership), ownership[formation.me.rank]

        def write_record() -> None:
            self._worker.journal.write(
                Event.COMMIT,
                step=self._replica.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                loss=loss,
                grad_sum=reduced.grad_sum,
                stall_ms=self._stall_ms,
                **self._batch(own_shards),
            )

        self._advance(formation, lambda: self._apply(reduced, write_record), loss)

    def skip(self, formation: Formation, result: AuditResult, own_shards: Sequence[int]) -> None:
        """Skip the batch (policy ``skip``): the number of steps grows by one, and the weights stay.

        Optimizers, schedulers and the functions of ``after_update`` do not run. The journal has the
        skipped shards and samples.

        Args:
            own_shards: the shards of this rank.

        Raises:
            GenerationSuperseded: if another generation was begun before.
            LeaseOver: if the lease of this node has run out, so that others may train instead.
        """

        def write_record() -> None:
            with self._replica.update():
                self._deal()
                self._worker.journal.write(
                    Event.SKIP,
                    step=self._replica.step,
                    generation=formation.plan.generation,
                    rank=formation.me.rank,
                    world=len(formation.plan.members),
                    shards=result.shards,
                    samples=self._work.samples(own_shards),
                )

        self._advance(formation, write_record, float("nan"))

    def _advance(self, formation: Formation, take_step: Callable[[], None], loss: float) -> None:
        """Wait for the keeper, and run ``take_step`` while newer generations wait for the step.

        The new step is then shown on the board. The keeper is told at once if the script does not
        write into the state, else at the next transaction.

        Raises:
            GenerationSuperseded, LeaseOver: as :meth:`commit`.
        """
        worker, replica = self._worker, self._replica
        self._await_copy()
        if worker.board.lease_over:  # the process or its node was stopped too long
            raise LeaseOver("the lease of this node has run out")
        with worker.regrouper.advance(formation):
            take_step()
            worker.regrouper.step = replica.step
        worker.board.progress(replica.step, loss)
        if not replica.at_entry:
            worker.board.announce()

    def _await_copy(self) -> None:
        """Wait until the keeper has finished its copy, for a limited time.

        A copy that was due and is not finished is journalled as failed. The board shows this rank
        as waiting, so that a slow keeper does not make it look hung.
        """
        board, step = self._worker.board, self._replica.step
        began_s = time.monotonic()
        with board.waiting():
            board.await_copy(step, _COPY_WAIT_S, _DUE_COPY_WAIT_S)
        waited_s = time.monotonic() - began_s
        self._stall_ms = round(waited_s * 1000, 3)
        if waited_s > _DUE_COPY_WAIT_S:
            reason = f"the replica keeper had not finished the due copy after {waited_s:.2f} s"
            self._worker.journal.write(
                Event.COPY_FAILED, worker=self._worker.name, step=step, reason=reason
            )

    def _deal(self) -> None:
        """Let the following batch deal the samples of this step, if the batch follows the world."""
        if self._replica.following is not None:
            self._replica.following.deal(self._replica.step, self._work.shard_count)

    def _batch(self, own_shards: Sequence[int]) -> dict[str, Any]:
        """Return the journal fields of a batch that follows the world.

        They are the number of samples, the learning rate that the first optimizer used, and the
        factor of the rates. The result is empty for other batches.
        """
        following = self._replica.following
        if following is None:
            return {}
        samples = len(self._work.samples(own_shards)) // len(own_shards) * self._work.shard_count
        return {
            "samples": samples,
            "rate": following.rate,
            "multiplier": following.multiplier(self._replica.step),
        }

    def _apply(self, reduced: Reduced, write_record: Callable[[], None]) -> None:
        """Run the optimizer and journal the commit.

        The commit is journalled before peers can read the new state, so that no state is restored
        without a record of its commit.
        """
        replica = self._replica
        gradients, buffer_changes = self._work.update_of(reduced)
        for parameter, gradient in zip(replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(replica.parameters, self._clip_norm)
        with replica.update():
            self._deal()
            replica.advance()
            replica.buffers.commit(buffer_changes.differences, buffer_changes.integers)
            self._run_after_update()
            self._worker.hooks.injected.updated()
            write_record()
        for parameter in replica.parameters:
            parameter.grad = None

    def _run_after_update(self) -> None:
        """Call the job's functions for the end of an update, with the same seed on all ranks."""
        replica, step = self._replica, self._replica.step
        if replica.after_update:
            seed_everything(
                self._worker.config.seed, step, self._work.shard_count
            )  # after the shards
            replica.run_after_update()
            replica.buffers.take_in()


def _mean_loss(reduced: Reduced, ownership: Sequence[Sequence[int]]) -> float:
    """Return the mean loss over the shards, added in their order: the same bits on every rank."""
    owners = {shard: rank for rank, shards in enumerate(ownership) for shard in shards}
    losses = [float(reduced.sidecars[owners[shard]][shard]) for shard in sorted(owners)]
    return sum(losses) / len(losses)
