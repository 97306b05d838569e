"""Means of a mistake of the runtime: functions that are replaced in one worker, and the time.

-> suites/canary/wrong_jobs.py has the mistakes that use them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Times of a mistake: in each step of every run; in each step after a recovery; in the first of
#: them; in the last step of a run that has recovered; in the last step of every run; in that of
#: every run that is longer than what is compared with plain PyTorch; when a state is taken over.
EVERY, AFTER, ONCE, LAST, END, LATE, RESTORE = (
    "every",
    "after",
    "once",
    "last",
    "end",
    "late",
    "restore",
)

_FILE = "mistake.json"


def order(runs: Path, mistake: str, when: str) -> None:
    """Let the workers of the next runs in this directory make a mistake, until the next order.

    The order is a file beside the directories of the runs, and no option of the job. All runs so
    have the same twin and reference, which are right. Plain PyTorch reads no such file.

    Args:
        runs: directory of the harness, with the directories of its runs.
        mistake: name of a function of :mod:`chaoskit.suites.canary.wrong_jobs`; "" for none.
        when: one of the times of this module.
    """
    (runs / _FILE).write_text(json.dumps({"mistake": mistake, "when": when}))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's memory of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


#: (module, name) -> original function: a train function that is entered again replaces it again.
_own: dict[tuple[str, str], Any] = {}
#: Generation of the first membership of this process.
_born: list[int] = []


class WrongWorker:
    """Access of mistakes to the functions of a worker, and the time at which they are made.

    Attributes:
        first: the weights with which training begins, as this rank has them.
        shard: index of the shard that is computed.
        mistake: name of the ordered mistake; "" without an order.
        when: time of the ordered mistake.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        *,
        first: list[Tensor],
        steps: int,
    ) -> None:
        self.trainer, self.model, self.first = trainer, model, first
        self.optimizer, self.scheduler = optimizer, scheduler
        self.shard, self._last = 0, steps - 1
        self._recovered_at = -1
        self.mistake, self.when = "", EVERY
        file = Path(trainer.disk).parents[2] / _FILE
        if trainer.worker != "reference" and file.is_file():
            ordered = json.loads(file.read_text())
            self.mistake, self.when = ordered["mistake"], ordered["when"]

    @property
    def is_sharded(self) -> bool:
        """True if the state is spread over the ranks."""
        return hasattr(self.trainer, "rehearses")

    @property
    def state(self) -> Any:
        """The registered state."""
        return self.trainer.state if self.is_sharded else self.trainer.replica

    @property
    def generation(self) -> int:
        """The membership in which this process trains; 0 in a rehearsal."""
        formation = self.trainer._formation
        return formation.plan.generation if formation is not None else 0

    @property
    def is_heir(self) -> bool:
        """True if this process has taken the place of another one."""
        if not _born and self.generation:
            _born.append(self.generation)
        return bool(_born) and _born[0] > 1

    @property
    def is_due(self) -> bool:
        """True if the mistake is made now."""
        generation, step, _ = self.generation, self.trainer.step, self.is_heir
        if self.when in (EVERY, END, LATE):
            return generation > 0 and (self.when == EVERY or step == self._last)
        if generation < 2:
            return False
        if self._recovered_at < 0:
            self._recovered_at = step
        return self.when == AFTER or step == (
            self._recovered_at if self.when == ONCE else self._last
        )

    @property
    def is_due_on_one(self) -> bool:
        """True if the mistake is made now, on rank 1 only."""
        return self.is_due and self.trainer.rank == 1

    @property
    def is_due_on_heir(self) -> bool:
        """True if the mistake is made now, on the replacement only."""
        return self.is_due and self.is_heir

    # -- replacements ------------------------------------------------------------------------------

    @property
    def weights(self) -> list[Tensor]:
        """The weights in this rank's memory."""
        return [local(parameter) for parameter in self.model.parameters()]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients in this rank's memory."""
        return [
            local(parameter.grad)
            for parameter in self.model.parameters()
            if parameter.grad is not None
        ]

    def moments(self, *names: str) -> list[Tensor]:
        """Return the optimizer's state of each tensor, under these names."""
        return [
            local(tensor)
            for path, tensor in self.state.optimizer_tensors()
            if path.rpartition("/")[2] in names
        ]

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function of an object or a module by ``make(function)``.

        A function of a module that was replaced before is not wrapped again: ``make`` gets the
        original.
        """
        if not hasattr(owner, "__file__"):
            setattr(owner, name, make(getattr(owner, name)))
            return
        original = _own.setdefault((owner.__name__, name), getattr(owner, name))
        setattr(owner, name, make(original))

    def around_update(self, change: Callable[[Callable[[], None]], None]) -> None:
        """Run ``change`` in place of the step of optimizers and schedulers, its argument."""

        def make(advance: Callable[[], None]) -> Callable[[], None]:
            def wrong() -> None:
                with torch.no_grad():
                    change(advance)

            return wrong

        self.replace(self.state, "advance", make)

    def before_update(self, change: Callable[[], object]) -> None:
        """Run ``change`` when the gradients are reduced, and not used yet."""

        def wrong(advance: Callable[[], None]) -> None:
            change()
            advance()

        self.around_update(wrong)

    def after_update(self, change: Callable[[], object]) -> None:
        """Run ``change`` when the weights are new, and no other process has read them."""

        def wrong(advance: Callable[[], None]) -> None:
            advance()
            change()

        self.around_update(wrong)

    def at_restore(self, change: Callable[[], object]) -> None:
        """Run ``change`` when the state was taken over from another process, or from copies.

        In a sharded job, whose train function is entered again after a loss, it runs at once then.
        """
        if self.is_sharded:
            if self.generation > 1:
                with torch.no_grad():
                    change()
            return

        def make(pull: Callable[..., Any]) -> Callable[..., Any]:
            def wrong(*arguments: Any, **options: Any) -> Any:
                pulled = pull(*arguments, **options)
                with torch.no_grad():
                    change()
                return pulled

            return wrong

        self.replace(self.module, "pull", make)

    def scale_gradient(self, factor: Callable[[], float]) -> None:
        """Scale the gradient of a shard, but not its loss, which is recorded."""

        def make(backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
            return lambda loss: backward(loss.detach() + (loss - loss.detach()) * factor())

        self.replace(self.trainer, "_backward", make)

    @property
    def module(self) -> Any:
        """The module of the trainer."""
        return sys.modules[type(self.trainer).__module__]
