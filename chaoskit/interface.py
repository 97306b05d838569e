"""The interface of a trainer, the first argument of a job's train function.

-> ``runtime/step/trainer.py`` and ``runtime/step/sharded_trainer.py`` implement it, and
``plain.py`` for the reference. ``runtime/step/transaction.py``: a step.
"""

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
    """The view of a rank on the run; its interface is the same for replicated and sharded jobs.

    Attributes:
        seed: the seed of the run; build the model from it.
        device: the device of model and batches.
        disk: a directory of this node alone, for files that the job writes.
    """

    seed: int
    device: torch.device
    disk: Path

    @property
    def step(self) -> int:
        """The number of committed steps; equal on all ranks whenever the code of the job runs."""

    @property
    def rank(self) -> int:
        """The number of this process in the current world; it can change when ranks are lost."""

    @property
    def world(self) -> int:
        """The number of ranks in the current world."""

    @property
    def worker(self) -> str:
        """The name of this process in journals and logs; no other process of the run gets it."""

    @property
    def will_restore(self) -> bool:
        """True if :meth:`register` replaces all weights and buffers, so they need no values."""

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        """Register the model and the optimizers to train, before the first transaction.

        Args:
            model: the model, equal on every rank; in a sharded job, sharded over :meth:`mesh`.
            optimizer: an optimizer over the model's parameters, or several that take their steps in
                this order.
            scheduler: one or more schedulers, which are stepped once a committed step.
            clip_norm: largest 2-norm of the whole reduced gradient; None does not clip.

        Raises:
            BadInput: if the model cannot be trained like this.
        """

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update, behind the schedulers, in the commit.

        Use it for code that changes registered state, such as an average of the weights. A rank
        that takes a step over from other ranks does not call it. It runs without gradients and with
        the same random numbers on every rank, and not for a batch that is skipped. ``trainer.step``
        is the number of the step, as in the loop over its shards. Several functions are called in
        the order in which they were given.

        Args:
            function: a function without arguments. It must do the same on every rank.

        Returns:
            ``function``, so that this method serves as a decorator.

        Raises:
            BadInput: if it is called before :meth:`register` or after the first transaction was
                entered.
        """

    def transaction(self) -> Transaction:
        """Return an attempt at the next step: ``with trainer.transaction() as step``.

        The step is committed after the last shard of ``step.shards``. After a fault that loop
        continues with the shards that must be computed again.
        """

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return a device mesh over all ranks, for ``fully_shard``. A job that calls it is sharded.

        The call is found in the source of the job. So it must be in the train function, or in a
        function of the same file that the train function calls by name.

        Args:
            sizes: the size of each dimension by its name; the last one varies fastest, and -1
                stands for the ranks that are left. The default is one dimension ``shard``.
                ``mesh(replicate=2, shard=-1)`` is for HSDP.

        Raises:
            BadInput: if the ranks do not make up such a mesh, or the call is at another place.
        """

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Return the reduction of a value over all ranks, or of a function over all shards.

        It is for code between transactions, like :meth:`broadcast` and :meth:`barrier`, and all
        ranks must make the same calls. A call has the same result on every rank, even after a
        fault; a rank that joins gets the results since the last commit.

        Args:
            value: a float, an int or a small CPU tensor, one of each rank. With ``shards``, a
                function that returns one for a shard, 0 to ``shards - 1``; each shard is computed
                by one rank, and after a fault by another one.
            op: ``sum``, ``mean``, ``max`` or ``min``.
            shards: number of shards, which are reduced in a fixed order: the result has the same
                bits at every world size.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source`` on every rank.

        Args:
            value: a float, an int or a small CPU tensor; every rank passes one, as ranks can change
                their numbers. Or a function that returns one, which only ``source`` calls.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """

    def long_phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work between steps that may take any time, such as an evaluation.

        It is never taken for a hang, unless it exceeds ``long_limit_s``. The journal has ``name``.
        """

    def elastic_event_detected(self) -> bool:
        """Return whether this rank knows that another world will take the next step."""

    def on_resize(self, callback: Callable[[Resize], object]) -> Callable[[Resize], object]:
        """Call ``callback`` on every rank when the size of the world has changed.

        It is called before a step is committed in the new world. Return ``callback``, as the next
        two methods do, so that they serve as decorators.
        """

    def on_preempt(
        self, callback: Callable[[Preemption], object]
    ) -> Callable[[Preemption], object]:
        """Call ``callback`` on a rank that leaves: the world shrinks, or it loses its node."""

    def on_fault(self, callback: Callable[[RankLost], object]) -> Callable[[RankLost], object]:
        """Call ``callback`` on the remaining ranks, once for each rank that was lost."""
