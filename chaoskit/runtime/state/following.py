"""A batch that follows the world: how many shards were dealt before, and what the optimizers make of the next ones.

The same on all ranks; travels with the state. A job that keeps its batch has none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from chaoskit.config import RunConfig
from chaoskit.elastic.scaling import BatchScaler, Hyperparameters, read_group
from chaoskit.errors import BadInput


class Following:
    """Deals shards to steps, and scales the optimizers' numbers with them.

    Attributes:
        dealt: shards of all steps before.
        rate: learning rate with which the first parameter group took its newest step.

    Raises:
        BadInput: for an optimizer, or a size of the world, that the rule's source does not cover.
    """

    def __init__(self, config: RunConfig, optimizers: Sequence[Optimizer]) -> None:
        follow = config.follow
        assert follow is not None
        self.dealt, self.rate = 0, 0.0
        self._rule, self._warmup_steps, self._named = (
            follow.rule,
            follow.warmup_steps,
            config.named_shards,
        )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        sizes = [shards for _, shards in follow.schedule]
        sizes += [
            config.shards_of(-1, world) for world in range(config.least_world, config.nodes_max + 1)
        ]
        for base in self._bases(groups):
            for shards in sizes:
                BatchScaler(follow.rule, base, changes=[(0, shards)])
        self._base = self._bases(groups[:1])[0]
        self._scaling = self._make([])

    def _bases(self, groups: Sequence[dict[str, Any]]) -> list[Hyperparameters]:
        """What the groups work with at the batch that the script names; their rates come and go with schedules."""
        if self._rule == "none":
            return [Hyperparameters(lr=1.0, batch=self._named)]
        return [read_group(group, self._named, lr=1.0) for group in groups]

    def _make(self, changes: Sequence[tuple[int, int]]) -> BatchScaler:
        return BatchScaler(self._rule, self._base, warmup_steps=self._warmup_steps, changes=changes)

    def deal(self, step: int, shards: int) -> None:
        """``step``, the next one, has so many shards."""
        self._scaling.change(step, shards)
        self.dealt += shards

    def apply(self, optimizer: Optimizer, step: int) -> AbstractContextManager[None]:
        """Inside of it the optimizer works with what its own numbers mean for the batch of ``step``."""
        return self._scaling.apply(optimizer, step)

    def multiplier(self, step: int) -> float:
        """Of the learning rates that the script's schedule wants."""
        return self._scaling.multiplier(step)

    def state(self) -> dict[str, Any]:
        """Numbers that :meth:`load` takes on another rank, or in another run."""
        changes = needed(self._scaling.changes, self._warmup_steps, self._named)
        return {"dealt": self.dealt, "named": self._named, "changes": changes}

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on from ``step`` of a run with this state; None: one whose batch was that which the script names.

        Raises:
            BadInput: if it was started with another number of nodes or shards: the script's batch meant another one.
        """
        if state is not None and state["named"] != self._named:
            remedy = f"start with as many nodes and shards as before, so that they have {state['named']} together"
            raise BadInput("nodes", f"{self._named} shards", remedy)
        if state is None:
            self.dealt, self._scaling = step * self._named, self._make([])
        else:
            self.dealt, self._scaling = (
                state["dealt"],
                self._make([(begin, size) for begin, size in state["changes"]]),
            )


def needed(
    changes: Sequence[tuple[int, int]], warmup_steps: int, named: int
) -> list[tuple[int, int]]:
    """The (step, shards) that what follows hangs on: nothing before a change whose warm-up was over at the next. Pure.

    The same whoever asks, a rank that has seen all of them or one that began with what is needed.
    """
    settled = (
        at
        for at in reversed(range(len(changes) - 1))
        if changes[at + 1][0] - changes[at][0] >= warmup_steps
    )
    rest = list(changes[next(settled, 0) :])
    return rest[1:] if rest and rest[0][1] == named else rest
