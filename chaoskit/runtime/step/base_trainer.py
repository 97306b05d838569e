"""The base class of the trainers of replicated and of sharded jobs.

-> step/trainer.py and step/sharded_trainer.py: the step, and the recovery after a loss.
step/collectives.py: what a collective of user code computes. step/callbacks.py: the hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from chaoskit.errors import BadInput
from chaoskit.runtime.group.collective_log import CollectiveLog
from chaoskit.runtime.group.regroup import Formation
from chaoskit.runtime.state.prefetch import require_no_draws
from chaoskit.runtime.state.sampling import fetch, load, seed_everything
from chaoskit.runtime.step import collectives
from chaoskit.runtime.step.callbacks import Preemption, RankLost, Resize
from chaoskit.runtime.step.collectives import Call, Value
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.sketch import TensorBox, sketch
from chaoskit.vocabulary import Event, Phase


def this_device(device_type: str) -> torch.device:
    """Return the device of this process, given its kind: ``cpu`` or ``cuda``."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device(device_type)
    )


class Describable(Protocol):
    """The trained state, as far as it is described in the journal."""

    def described(self) -> Iterator[TensorBox]:
        """Yield this rank's part of every tensor, with its path and its box in the whole."""

    def scalars_digest(self) -> str:
        """Return a digest of the state that is not in tensors."""

    def rates(self) -> list[float]:
        """Return the learning rate of each parameter group that has one."""


class Trained(Describable, Protocol):
    """The part of the registered objects that all trainers use alike."""

    after_update: list[Callable[[], object]]


class BaseTrainer(ABC):
    """The trainer of one rank.

    Attributes:
        seed: seed of the run; build the model from it.
        device: the device of model and batches.
        disk: a directory of this node for files of the job; disk faults strike here.
    """

    def __init__(self, worker: WorkerContext, formation: Formation | None = None) -> None:
        self._worker, self._callbacks, self._formation = worker, worker.callbacks, formation
        self.config = worker.config
        self.seed = worker.config.seed
        self.disk = worker.disk
        self.device = this_device(worker.config.device)
        self._is_registered = self._has_begun = False
        self._over = False  # the loop over the shards of this transaction has ended
        self._prefetcher = worker.prefetcher
        self._calls, self._calling = CollectiveLog(), False

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of committed steps.

        It is the same on every rank whenever the user's code runs, except in a new process. There
        it is 0 until the process has taken over the state.
        """

    @property
    @abstractmethod
    def _registered(self) -> Trained:
        """The objects that the user has registered. Read it only after ``register``."""

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update, after the schedulers, as part of the commit.

        It is not called for a skipped step. Its result is ignored.

        Return ``function``, so that this can be used as a decorator.

        Raises:
            BadInput: if ``function`` is not callable, or if this is called before ``register`` or
                after the first transaction was entered.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise BadInput("after_update", function, "pass a function without arguments")
        if not self._is_registered:
            raise BadInput(
                "after_update", name, "call trainer.register(model=..., optimizer=...) first"
            )
        if self._has_begun:
            remedy = (
                "call it before the first transaction: a rank that joins would miss a later call. "
                "To begin later, compare trainer.step in the function"
            )
            raise BadInput("after_update", name, remedy)
        self._registered.after_update.append(function)
        return function

    def on_resize(self, callback: Callable[[Resize], object]) -> Callable[[Resize], object]:
        """Call ``callback`` on every rank when the world size changes, before the next commit.

        It is called on new ranks as well. ``trainer.rank`` and ``trainer.world`` are those of the
        new world. The callback must not change the registered objects: joining ranks take those
        over, and hooks run at a different time on each rank.

        ``callback`` gets a :class:`~chaoskit.runtime.step.callbacks.Resize`; its result is ignored.
        An exception in it is journalled, and training goes on. BadInput ends the run.

        Return ``callback``, so that this can be used as a decorator.
        """
        self._callbacks.on_resize.append(callback)
        return callback

    def on_preempt(
        self, callback: Callable[[Preemption], object]
    ) -> Callable[[Preemption], object]:
        """Call ``callback`` before this rank leaves: the world shrinks, or its node is taken away.

        The other ranks do not wait, so the callback cannot use collectives. When its seconds are
        over, the process is ended. A rank that has finished, or has entered no generation yet, ends
        without this call.

        ``callback`` gets a :class:`~chaoskit.runtime.step.callbacks.Preemption`; its result is
        ignored. Any ``Exception`` in it is journalled, and does not end the run.

        Return ``callback``, so that this can be used as a decorator.
        """
        self._callbacks.on_preempt.append(callback)
        return callback

    def on_fault(self, callback: Callable[[RankLost], object]) -> Callable[[RankLost], object]:
        """Call ``callback`` on the remaining ranks for each lost rank, before ``on_resize``.

        A new process does not call it for ranks that were lost before. ``callback`` gets a
        :class:`~chaoskit.runtime.step.callbacks.RankLost`; its result is ignored. An exception in
        it is journalled, and training goes on. BadInput ends the run.

        Return ``callback``, so that this can be used as a decorator.
        """
        self._callbacks.on_fault.append(callback)
        return callback

    @property
    def _entered_formation(self) -> Formation:
        """The generation in which this rank takes part.

        Raises:
            RuntimeError: if it has entered none yet.
        """
        if self._formation is None:
            raise RuntimeError("this rank has entered no generation yet")
        return self._formation

    @property
    def rank(self) -> int:
        """This process's rank in the current world. It can change with each generation.

        It is 0 before the first generation is entered.
        """
        return self._formation.me.rank if self._formation else 0

    @property
    def world(self) -> int:
        """The number of ranks in the current generation; 1 before the first is entered."""
        return len(self._formation.plan.members) if self._formation else 1

    @property
    def worker(self) -> str:
        """The name of this process in journals and logs. No other process gets the same name."""
        return self._worker.name

    @property
    def will_restore(self) -> bool:
        """True if ``register`` replaces every weight and buffer.

        They then need memory but no values. In a replicated job this is always False.
        """
        return False

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return a device mesh over all ranks in a sharded job; always raise in a replicated one.

        A job is sharded if its train function calls ``trainer.mesh``. The call may also be in a
        function of the same file that the train function calls by name, at any depth.

        Args:
            sizes: the size of each dimension by its name; the last one varies fastest, and -1
                stands for the ranks that are left. Without sizes there is one dimension ``shard``.

        Raises:
            BadInput: always in a replicated job; in a sharded job if the ranks do not make up such
                a mesh.
        """
        remedy = "call trainer.mesh() in the train function, or in a function of the same file that it calls by name"
        raise BadInput("mesh", sizes, f"{remedy}: a sharded job is recognized by that call")

    def _obey_halt(self) -> None:
        """Leave the train function if the job must end after this step.

        A rehearsal is finished first.

        Raises:
            TrainingHalted: if this worker must end.
        """
        if self._formation is not None:
            self._worker.halt.obey(self.step)

    def journal_state(self) -> None:
        """Write sketches of the tensors, a digest of the rest and the rates to the journal.

        See :mod:`chaoskit.sketch`.

        Raises:
            RuntimeError: before ``register``, or if this rank has entered no generation yet.
        """
        state = self._registered
        self._worker.journal.write(
            Event.STATE,
            step=self.step,
            generation=self._entered_formation.plan.generation,
            tensors=sketch(state.described()),
            scalars=state.scalars_digest(),
            rates=state.rates(),
        )

    def _fetch(
        self, dataset: Any, samples: Sequence[int], shard: int, *, prefetch: bool, rehearses: bool
    ) -> Any:
        """Return the batch of a shard on this rank's device.

        Data faults strike here, for prefetched batches as well.

        Args:
            rehearses: refuse a dataset that draws from global generators, if it is prefetched.
        """
        fetch_batch = partial(
            fetch, dataset, samples, self.device, self._prefetcher.take if prefetch else load
        )
        if prefetch and rehearses:
            fetch_batch = partial(require_no_draws, fetch_batch)
        return self._worker.hooks.injected.fetch(fetch_batch, self.step, shard)

    def _finish(self) -> None:
        """Check that the shards were computed when a transaction is left without an exception.

        Raises:
            BadInput: if the loop over the shards has not ended.
        """
        if not self._over:
            remedy = "loop over step.shards(...) to its end in every transaction, and call step.backward(loss) in it"
            raise BadInput("step.shards", None, remedy)

    def _interrupt(self) -> None:
        """Note the state when a transaction is left by an exception.

        The user's code may catch the exception, and is then between two transactions.
        """
        self._worker.board.enter(Phase.OUTSIDE)
        if not self._over:  # otherwise it was noted at the end of the loop
            self._note_state()

    @abstractmethod
    def _note_state(self) -> None:
        """Remember the registered state at the moment at which the script goes on."""

    @contextmanager
    def _plain_numbers(self) -> Iterator[None]:
        """Reduce and update as if the loop were not inside an autocast context.

        The cache of autocast is cleared, as it holds copies of the old weights.
        """
        with torch.autocast(self.device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Reduce a value over all ranks, or a function over all shards.

        The result is the same on every rank.

        Args:
            value: a float, an int or a small CPU tensor of each rank. With ``shards``, a function
                that returns such a value for a shard, 0 to ``shards - 1``. Each shard is computed
                by one rank, after a fault by another rank.
            op: ``sum``, ``mean``, ``max`` or ``min``.
            shards: the number of shards. They are reduced in a fixed order, so that the result has
                the same bits at every world size.

        Raises:
            BadInput: if it is called elsewhere than between two steps, or an argument is not valid.
                Also if ranks call different collectives, or pass different types or shapes.
        """
        contribution = (
            partial(self._seeded, value) if callable(value) and shards is not None else value
        )
        return self._call(collectives.all_reduce(contribution, op, shards))

    def _seeded(self, function: Callable[[int], Any], shard: int) -> Any:
        """Return the value of ``shard``. Its randomness depends on step, call and shard only."""
        seed_everything(self.seed, self.step, self._calls.next_call(self.step), shard)
        return function(shard)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source`` on every rank.

        Args:
            value: a float, an int or a small CPU tensor. Every rank passes a value, as ranks can
                change their numbers. Or a function that returns one, which only ``source`` calls.

        Raises:
            BadInput: if it is called elsewhere than between two steps, or an argument is not valid.
                Also if ranks call different collectives.
        """
        return self._call(collectives.broadcast(value, source))

    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            BadInput: if it is called elsewhere than between two steps, or ranks call different
                collectives.
        """
        self._call(collectives.barrier())

    def _call(self, call: Call) -> Value | None:
        """Return the result of the next collective since the last commit; None for a barrier.

        The result is replayed if this rank has it already. Otherwise all ranks make the call.

        Raises:
            BadInput: if it is called elsewhere than between two steps, or ranks make different
                calls.
        """
        if not self._over or self._calling:
            remedy = (
                "call it behind the loop over step.shards(), between two steps: not in the loop, not before the first "
                "transaction, and not within another collective or a hook"
            )
            raise BadInput(f"trainer.{call.name}", call.text, remedy)
        self._calling = True
        try:
            while (result := self._calls.replay(self.step)) is None:
                self._make(call)
            return call.read(result)
        finally:
            self._calling = False

    @abstractmethod
    def _make(self, call: Call) -> None:
        """Take part in ``call`` and record its result.

        If the world changes meanwhile, no result is recorded, and :meth:`_call` makes it again. The
        trainer of a sharded job leaves the train function instead.
        """

    @contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """Declare the block as work of any length between steps, such as an evaluation.

        It does not count as a hang unless it exceeds ``long_limit_s`` seconds. The journal has
        ``name``.
        """
        self._worker.board.enter(Phase.LONG)
        self._worker.journal.write(Event.LONG_PHASE, name=name, step=self.step)
        try:
            yield
        finally:
            self._worker.board.enter(Phase.OUTSIDE)
