"""The interface of a trainer: what the train function of a job gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from chaoskit.runtime.state.registered import Scheduler
    from chaoskit.runtime.step.callbacks import Preemption, RankLost, Resize
    from chaoskit.runtime.step.transaction import Transaction


class Trainer(Protocol):
    """One rank's view of the run, the same for replicated and sharded jobs.

    Attributes:
        seed: the run's; build the model from it.
        device: where model and batches live.
        disk: a directory of this node's own, for files that the job writes.
    """

    seed: int
    device: torch.device
    disk: Path

    @property
    def step(self) -> int:
        """Committed steps; the same on every rank whenever the code of the job runs."""

    @property
    def rank(self) -> int:
        """Number of this process in the current world; it can change when ranks are lost."""

    @property
    def world(self) -> int:
        """Ranks in the current world."""

    @property
    def worker(self) -> str:
        """Name of this process, as in journals and logs; never used again by another one."""

    @property
    def will_restore(self) -> bool:
        """Whether :meth:`register` replaces every weight and buffer, so that they need no values before."""

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Name what is trained, before the first transaction.

        Args:
            model: the same on every rank; of a sharded job, sharded over :meth:`mesh`.
            optimizer: over the model's parameters. One, or several that take their steps in this order.
            scheduler: stepped once a committed step. One, or several.
            clip_norm: largest 2-norm of the whole reduced gradient; None leaves it as it is.

        Raises:
            BadInput: if the model cannot be trained so.
        """

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update, behind the schedulers, as a part of the commit.

        The place for code that changes what is registered, such as an average of the weights: a rank that takes a step
        over from other ranks does not call it. It runs without gradients and with the same random numbers on every
        rank, and not for a batch that is skipped. ``trainer.step`` is the number of the step, as in the loop over its
        shards. Several functions are called in the order in which they were given.

        Args:
            function: without arguments. It must do the same on every rank.

        Returns:
            ``function``, so that this method serves as a decorator.

        Raises:
            BadInput: if it is called before :meth:`register` or after the first transaction was entered.
        """

    def transaction(self) -> Transaction:
        """One attempt at the next step: ``with trainer.transaction() as step``."""

    def mesh(self, **sizes: int) -> DeviceMesh:
        """A device mesh over all ranks, for ``fully_shard``. A job that calls it is a sharded job.

        Args:
            sizes: its dimensions, the last one varies fastest; -1 stands for what is left. Without any: one dimension
                ``shard``. ``mesh(replicate=2, shard=-1)`` is for HSDP.

        Raises:
            BadInput: if the ranks do not make up such a mesh, or the job is not a sharded one.
        """

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Reduce a value over all ranks, or a function of the shard over all shards. The same result on every rank.

        For code behind a transaction; so are :meth:`broadcast` and :meth:`barrier`. One call has one result on every
        rank, whatever breaks; a rank that joins gets the results since the last commit. All ranks make the same calls.

        Args:
            value: a float, an int or a small CPU tensor: one of each rank. With ``shards`` a function that gives one
                for a shard, 0 to ``shards - 1``; each shard is computed by one rank, after a fault by another one.
            op: ``sum``, ``mean``, ``max`` or ``min``.
            shards: so many are reduced in one order, with the same bits at every world size.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank ``source``, on every rank.

        Args:
            value: a float, an int or a small CPU tensor; every rank passes one, as ranks can change their numbers. Or a
                function that gives one: only ``source`` calls it.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def long_phase(self, name: str) -> AbstractContextManager[None]:
        """Declare work between steps that may take any time, such as an evaluation: it is never called a hang."""

    def elastic_event_detected(self) -> bool:
        """Whether the next step will be taken by another world, of which this rank is told early."""

    def on_resize(self, callback: Callable[[Resize], object]) -> Callable[[Resize], object]:
        """Call ``callback`` on every rank when the world has another size, before a step is committed in it."""

    def on_preempt(
        self, callback: Callable[[Preemption], object]
    ) -> Callable[[Preemption], object]:
        """Call ``callback`` on a rank that goes because the world shrinks or its node is taken away."""

    def on_fault(self, callback: Callable[[RankLost], object]) -> Callable[[RankLost], object]:
        """Call ``callback`` on the ranks that go on after a rank was lost, once for each."""
