"""What a mistake of the runtime is made of: functions of the product that are replaced in one worker, and when."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: When a mistake is made: in each step of every run; in each step after a recovery; in the first of them; in the last
#: step of a run that has recovered; in the last step of every run; in that of every run that is longer than what is
#: compared with plain PyTorch; when a state is taken over.
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
    """Have the workers of the next runs in this directory make a mistake, until there is another order.

    It is a file beside the directories of the runs, and no option of the job: so all runs have one twin and one
    reference, which are right. Plain PyTorch reads no such file.
    """
    (runs / _FILE).write_text(json.dumps({"mistake": mistake, "when": when}))


def local(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


#: (module, name) -> the product's own function: a train function that is entered again replaces it again.
_own: dict[tuple[str, str], Any] = {}
#: The first membership of this process.
_born: list[int] = []


class WrongWorker:
    """What mistakes replace functions of, and when they are made.

    Attributes:
        first: the weights with which training begins, as this rank has them.
        shard: that is computed.
        mistake, when: as ordered; none where there is no order.
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
            told = json.loads(file.read_text())
            self.mistake, self.when = told["mistake"], told["when"]

    @property
    def is_sharded(self) -> bool:
        """Whether the state is spread over the ranks."""
        return hasattr(self.trainer, "rehearses")

    @property
    def state(self) -> Any:
        """What is registered."""
        return self.trainer.state if self.is_sharded else self.trainer.replica

    @property
    def generation(self) -> int:
        """Of the membership in which this process trains; 0 in a rehearsal."""
        formation = self.trainer._formation
        return formation.plan.generation if formation is not None else 0

    @property
    def is_heir(self) -> bool:
        """Whether this process has taken the place of another one."""
        if not _born and self.generation:
            _born.append(self.generation)
        return bool(_born) and _born[0] > 1

    @property
    def is_due(self) -> bool:
        """Whether the mistake is made now."""
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
        """The same on one rank only."""
        return self.is_due and self.trainer.rank == 1

    @property
    def is_due_on_heir(self) -> bool:
        """The same on the rank that was replaced only."""
        return self.is_due and self.is_heir

    # -- what can be replaced -------------------------------------------------------------------------------------

    @property
    def weights(self) -> list[Tensor]:
        """Of this rank."""
        return [local(parameter) for parameter in self.model.parameters()]

    @property
    def gradients(self) -> list[Tensor]:
        """What of the gradients is in this rank's memory."""
        return [local(one.grad) for one in self.model.parameters() if one.grad is not None]

    def moments(self, *names: str) -> list[Tensor]:
        """What the optimizer remembers of each tensor, under these names."""
        return [
            local(tensor)
            for path, tensor in self.state.optimizer_tensors()
            if path.rpartition("/")[2] in names
        ]

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(function)`` in the place of a function of the product: of an object, or of a module."""
        if not hasattr(owner, "__file__"):
            setattr(owner, name, make(getattr(owner, name)))
            return
        own = _own.setdefault((owner.__name__, name), getattr(owner, name))
        setattr(owner, name, make(own))

    def around_update(self, change: Callable[[Callable[[], None]], None]) -> None:
        """``change`` runs in the place of the step of optimizers and schedulers, which it is given."""

        def make(advance: Callable[[], None]) -> Callable[[], None]:
            def wrong() -> None:
                with torch.no_grad():
                    change(advance)

            return wrong

        self.replace(self.state, "advance", make)

    def before_update(self, change: Callable[[], object]) -> None:
        """The gradients are reduced, and not used yet."""

        def wrong(advance: Callable[[], None]) -> None:
            change()
            advance()

        self.around_update(wrong)

    def after_update(self, change: Callable[[], object]) -> None:
        """The weights are new, and no other process has seen them."""

        def wrong(advance: Callable[[], None]) -> None:
            advance()
            change()

        self.around_update(wrong)

    def at_restore(self, change: Callable[[], object]) -> None:
        """The state was taken over from another process, or from copies."""
        if self.is_sharded:
            if self.generation > 1:
                with torch.no_grad():
                    change()
            return

        def make(pull: Callable[..., Any]) -> Callable[..., Any]:
            def wrong(*given: Any, **more: Any) -> Any:
                pulled = pull(*given, **more)
                with torch.no_grad():
                    change()
                return pulled

            return wrong

        self.replace(self.module, "pull", make)

    def scale_gradient(self, factor: Callable[[], float]) -> None:
        """The gradient of a shard is another one; its loss, which is written down, is right."""

        def make(backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
            return lambda loss: backward(loss.detach() + (loss - loss.detach()) * factor())

        self.replace(self.trainer, "_backward", make)

    @property
    def module(self) -> Any:
        """Of the trainer."""
        return sys.modules[type(self.trainer).__module__]
