"""What the trainers of replicated jobs and of sharded ones have in common."""

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
from chaoskit.runtime.step.callbacks import HookMethods
from chaoskit.runtime.step.collectives import Call, Value
from chaoskit.runtime.step.context import WorkerContext
from chaoskit.sketch import TensorBox, sketch
from chaoskit.vocabulary import Event, Phase


def this_device(kind: str) -> torch.device:
    """The device of this process."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


class Describable(Protocol):
    """What is trained, as far as it is written down."""

    def described(self) -> Iterator[TensorBox]:
        """This rank's part of every tensor."""

    def scalars_digest(self) -> str:
        """Of everything else."""

    def rates(self) -> list[float]:
        """The learning rate of each group of parameters."""


class Trained(Describable, Protocol):
    """The registered objects, as far as all trainers use them alike."""

    after_update: list[Callable[[], object]]


class BaseTrainer(HookMethods, ABC):
    """One rank's view of the run.

    Attributes:
        seed: of the run; seed the building of the model with it.
        device: where model and batches live.
        disk: a directory of this node's own, for what the job writes; faults of disks strike here.
    """

    def __init__(self, worker: WorkerContext, formation: Formation | None = None) -> None:
        self._worker, self._callbacks, self._formation = worker, worker.callbacks, formation
        self.config = worker.config
        self.seed = worker.config.seed
        self.disk = worker.disk
        self.device = this_device(worker.config.device)
        self._is_registered = self._has_begun = False
        self._over = False  # the loop over the shards of this transaction has come to its end
        self._prefetcher = worker.prefetcher
        self._calls, self._calling = CollectiveLog(), False

    @property
    @abstractmethod
    def step(self) -> int:
        """Committed steps; the same on every rank whenever the user's code runs."""

    @property
    @abstractmethod
    def _registered(self) -> Trained:
        """What the user has registered."""

    def after_update(self, function: Callable[[], object]) -> Callable[[], object]:
        """Call ``function`` at the end of each update, behind the schedulers, as a part of the commit."""
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise BadInput("after_update", function, "pass a function without arguments")
        if not self._is_registered:
            raise BadInput(
                "after_update", name, "call trainer.register(model=..., optimizer=...) first"
            )
        if self._has_begun:
            remedy = "call it before the first transaction: a rank that joins would miss a later call. Look at "
            raise BadInput(
                "after_update",
                name,
                remedy + "trainer.step in the function for what is to begin later",
            )
        self._registered.after_update.append(function)
        return function

    @property
    def rank(self) -> int:
        """This process's number in the current world; it can change when ranks are lost."""
        return self._formation.me.rank if self._formation else 0

    @property
    def world(self) -> int:
        """Ranks in the current generation."""
        return len(self._formation.plan.members) if self._formation else 1

    @property
    def worker(self) -> str:
        """Name of this process, as in journals and logs; never used again by another one."""
        return self._worker.name

    @property
    def will_restore(self) -> bool:
        """Whether ``register`` replaces every weight and buffer: then they need no values before, only memory."""
        return False

    def mesh(self, **sizes: int) -> DeviceMesh:
        """A device mesh over all ranks; only sharded jobs have one.

        Raises:
            BadInput: in a replicated job.
        """
        remedy = "call trainer.mesh() in the train function, or in a function of the same file that it calls by name"
        raise BadInput("mesh", sizes, f"{remedy}: that is how a sharded job is told")

    def _obey_halt(self) -> None:
        """Leave the train function if the job is to end after this step. A rehearsal is finished first."""
        if self._formation is not None:
            self._worker.halt.obey(self.step)

    def tell_state(self) -> None:
        """Write down of each tensor what tells it from others; see :mod:`chaoskit.sketch`."""
        assert self._formation is not None
        state = self._registered
        self._worker.journal.write(
            Event.STATE,
            step=self.step,
            generation=self._formation.plan.generation,
            tensors=sketch(state.described()),
            scalars=state.scalars_digest(),
            rates=state.rates(),
        )

    def _fetch(
        self, dataset: Any, samples: Sequence[int], shard: int, *, prefetch: bool, rehearses: bool
    ) -> Any:
        """The batch of a shard. Faults of data strike here, wherever it is fetched."""
        act = partial(
            fetch, dataset, samples, self.device, self._prefetcher.take if prefetch else load
        )
        if prefetch and rehearses:
            act = partial(require_no_draws, act)
        return self._worker.hooks.injected.fetch(act, self.step, shard)

    def _finish(self) -> None:
        """The block of a transaction is left without an exception."""
        if not self._over:
            remedy = "loop over step.shards(...) to its end in every transaction, and call step.backward(loss) in it"
            raise BadInput("step.shards", None, remedy)

    def _interrupt(self) -> None:
        """The block is left by an exception, which the user's code may catch: it is between two transactions."""
        self._worker.board.enter(Phase.OUTSIDE)
        if not self._over:  # else it was noted behind the loop
            self._note_state()

    @abstractmethod
    def _note_state(self) -> None:
        """Take note of what is registered: the script goes on."""

    @contextmanager
    def _plain_numbers(self) -> Iterator[None]:
        """Reduce and update as if no autocast were around the loop: also without its copies of the old weights."""
        with torch.autocast(self.device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def all_reduce(self, value: Any, op: str = "sum", *, shards: int | None = None) -> Any:
        """Reduce a value over all ranks, or a function of the shard over all shards. The same result on every rank.

        Args:
            value: a float, an int or a small CPU tensor: one of each rank. With ``shards`` a function that gives one
                for a shard, 0 to ``shards - 1``; each shard is computed by one rank, after a fault by another one.
            op: ``sum``, ``mean``, ``max`` or ``min``.
            shards: so many are reduced in one order, with the same bits at every world size.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """
        contribution = (
            partial(self._seeded, value) if callable(value) and shards is not None else value
        )
        return self._call(collectives.all_reduce(contribution, op, shards))

    def _seeded(self, function: Callable[[int], Any], shard: int) -> Any:
        """The value of ``shard``, with randomness that depends on step, call and shard alone."""
        seed_everything(self.seed, self.step, self._calls.made(self.step), shard)
        return function(shard)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank ``source``, on every rank.

        Args:
            value: a float, an int or a small CPU tensor; every rank passes one, as ranks can change their numbers. Or a
                function that gives one: only ``source`` calls it.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """
        return self._call(collectives.broadcast(value, source))

    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            BadInput: if it is called within a step, or ranks call different things.
        """
        self._call(collectives.barrier())

    def _call(self, call: Call) -> Value | None:
        """Have the result of the next collective since the last commit: known already, or of a call of all ranks."""
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
        """Take part in ``call``, and write its result down. Not if the world changes meanwhile: it is made again."""

    @contextmanager
    def long_phase(self, name: str) -> Iterator[None]:
        """Declare work between steps that may take any time, such as an evaluation: it is never called a hang."""
        self._worker.board.enter(Phase.LONG)
        self._worker.journal.write(Event.LONG_PHASE, name=name, step=self.step)
        try:
            yield
        finally:
            self._worker.board.enter(Phase.OUTSIDE)
