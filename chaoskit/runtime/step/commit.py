"""What ends a step on this rank: the reduced gradients are applied, or its batch is skipped, and it is written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.integrity.guard import AuditResult
from chaoskit.runtime.reduction.choice import Reduced
from chaoskit.runtime.state.replica import Replica
from chaoskit.runtime.state.sampling import seed_everything
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.runtime.step.shardwork import ShardWork
from chaoskit.vocabulary import Event

_COPY_WAIT_S = 0.02  # a copy of the last step takes the time of one memory copy, and has had a whole step for it
_DUE_COPY_WAIT_S = (
    0.5  # one that is to be stored comes rarely, and if each were overtaken, nothing ever would be
)


class LeaseOver(ConnectionError):
    """The node was not heard for too long. It is said, so that all are planned again if it is heard after all."""


class Committer:
    """Moves the replica of one rank to the next step.

    Args:
        clip_norm: largest 2-norm of the reduced gradient; None leaves it as it is.
    """

    def __init__(
        self, worker: WorkerContext, replica: Replica, work: ShardWork, clip_norm: float | None
    ) -> None:
        self._worker, self._replica, self._work, self._clip_norm = worker, replica, work, clip_norm
        self._stall_ms = 0.0  # for a copy of the state, before the newest commit

    def commit(
        self, formation: Formation, reduced: Reduced, ownership: Sequence[Sequence[int]]
    ) -> None:
        """Run the optimizer with what all ranks agree on.

        Args:
            ownership: the shards of each rank.

        Raises:
            GenerationSuperseded: if another generation was begun before. LeaseOver: if others may train instead.
        """
        loss, mine = _mean_loss(reduced, ownership), ownership[formation.me.rank]

        def write_down() -> None:
            self._worker.journal.write(
                Event.COMMIT,
                step=self._replica.step,
                generation=formation.plan.generation,
                rank=formation.me.rank,
                world=len(formation.plan.members),
                loss=loss,
                grad_sum=reduced.grad_sum,
                stall_ms=self._stall_ms,
                **self._batch(mine),
            )

        self._advance(formation, lambda: self._apply(reduced, write_down), loss)

    def skip(self, formation: Formation, result: AuditResult, mine: Sequence[int]) -> None:
        """Policy ``skip``: the step counts, its batch is written down as skipped, the weights stay.

        Args:
            mine: the shards of this rank.

        Raises:
            GenerationSuperseded: if another generation was begun before. LeaseOver: if others may train instead.
        """

        def write_down() -> None:
            with self._replica.update():
                self._deal()
                self._worker.journal.write(
                    Event.SKIP,
                    step=self._replica.step,
                    generation=formation.plan.generation,
                    rank=formation.me.rank,
                    world=len(formation.plan.members),
                    shards=result.shards,
                    samples=self._work.samples(mine),
                )

        self._advance(formation, write_down, float("nan"))

    def _advance(self, formation: Formation, act: Callable[[], None], loss: float) -> None:
        worker, replica = self._worker, self._replica
        self._await_copy()
        if (
            worker.board.lease_over
        ):  # this process, or its whole node, stood still: its agent will end it
            raise LeaseOver("the lease of this node has run out")
        with worker.regrouper.advance(formation):
            act()
            worker.regrouper.step = replica.step
        worker.board.progress(replica.step, loss)
        if not replica.at_entry:
            worker.board.announce()

    def _await_copy(self) -> None:
        """Let the keeper finish its copy. Shown as waiting: a slow keeper does not make this a rank that hangs."""
        board, step = self._worker.board, self._replica.step
        began_s = time.monotonic()
        with board.waiting():
            board.await_copy(step, _COPY_WAIT_S, _DUE_COPY_WAIT_S)
        waited_s = time.monotonic() - began_s
        self._stall_ms = round(waited_s * 1000, 3)
        if waited_s > _DUE_COPY_WAIT_S:
            reason = f"no answer of the keeper for {waited_s:.2f} s, to a step whose copy was due"
            self._worker.journal.write(
                Event.COPY_FAILED, worker=self._worker.name, step=step, reason=reason
            )

    def _deal(self) -> None:
        if self._replica.following is not None:
            self._replica.following.deal(self._replica.step, self._work.shard_count)

    def _batch(self, mine: Sequence[int]) -> dict[str, Any]:
        """Of a batch that follows the world: samples of this step, and what the optimizers made of it."""
        following = self._replica.following
        if following is None:
            return {}
        samples = len(self._work.samples(mine)) // len(mine) * self._work.shard_count
        return {
            "samples": samples,
            "rate": following.rate,
            "multiplier": following.multiplier(self._replica.step),
        }

    def _apply(self, reduced: Reduced, write_down: Callable[[], None]) -> None:
        """Run the optimizer. The commit is written down before the new state can be read: none is ever restored of
        which no journal tells."""
        replica = self._replica
        gradients, moved = self._work.update_of(reduced)
        for parameter, gradient in zip(replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(replica.parameters, self._clip_norm)
        with replica.update():
            self._deal()
            replica.advance()
            replica.buffers.commit(moved.differences, moved.integers)
            self._run_after_update()
            self._worker.hooks.injected.updated()
            write_down()
        for parameter in replica.parameters:
            parameter.grad = None

    def _run_after_update(self) -> None:
        replica, step = self._replica, self._replica.step
        if replica.after_update:
            seed_everything(
                self._worker.config.seed, step, self._work.shard_count
            )  # behind the seeds of the shards
            replica.run_after_update()
            replica.buffers.take_in()


def _mean_loss(reduced: Reduced, ownership: Sequence[Sequence[int]]) -> float:
    """Over the shards, in their order: the same bits on every rank."""
    owners = {shard: rank for rank, shards in enumerate(ownership) for shard in shards}
    losses = [float(reduced.sidecars[owners[shard]][shard]) for shard in sorted(owners)]
    return sum(losses) / len(losses)
