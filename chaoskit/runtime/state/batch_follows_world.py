"""A batch that follows the world: shards dealt so far, and the scaling of the optimizers.

It is the same on all ranks, and a part of the shared state. A job with a fixed batch has none.

-> elastic/scaling.py: the rules for learning rates. config.py (``shards_of``): shards of a step.
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
        rate: learning rate with which the first parameter group took its newest step; 0 before.

    Raises:
        BadInput: for an optimizer, or a size of the world, that the rule's source does not cover.
        ValueError: if the batch of the job does not follow the world.
    """

    def __init__(self, config: RunConfig, optimizers: Sequence[Optimizer]) -> None:
        follow = config.follow
        if follow is None:
            raise ValueError("the batch of this job does not follow the world")
        self.dealt, self.rate = 0, 0.0
        self._rule = follow.rule
        self._warmup_steps = follow.warmup_steps
        self._named_shards = config.named_shards
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
        """Return the numbers of the groups at the batch that the script names.

        Learning rates are left out, because schedules change them.
        """
        if self._rule == "none":
            return [Hyperparameters(lr=1.0, batch=self._named_shards)]
        return [read_group(group, self._named_shards, lr=1.0) for group in groups]

    def _make(self, changes: Sequence[tuple[int, int]]) -> BatchScaler:
        """Return a scaler that begins with ``changes``."""
        return BatchScaler(self._rule, self._base, warmup_steps=self._warmup_steps, changes=changes)

    def deal(self, step: int, shards: int) -> None:
        """Record that ``step``, the next one, has ``shards`` shards."""
        self._scaling.change(step, shards)
        self.dealt += shards

    def apply(self, optimizer: Optimizer, step: int) -> AbstractContextManager[None]:
        """Return a context in which the optimizer's numbers are scaled to the batch of ``step``."""
        return self._scaling.apply(optimizer, step)

    def multiplier(self, step: int) -> float:
        """Return the factor by which the script's learning rates are multiplied at ``step``."""
        return self._scaling.multiplier(step)

    def state(self) -> dict[str, Any]:
        """Return the numbers that :meth:`load` takes on another rank, or in another run."""
        changes = needed_changes(self._scaling.changes, self._warmup_steps, self._named_shards)
        return {"dealt": self.dealt, "named": self._named_shards, "changes": changes}

    def load(self, state: dict[str, Any] | None, step: int) -> None:
        """Continue from ``step`` of a run with this state.

        Args:
            state: None for a run whose batch was the one that the script names.

        Raises:
            BadInput: if that run was started with another number of nodes or shards, so that the
                script's batch had another meaning.
        """
        if state is not None and state["named"] != self._named_shards:
            remedy = (
                f"start with as many nodes and shards as before, {state['named']} shards in total"
            )
            raise BadInput("nodes", f"{self._named_shards} shards", remedy)
        if state is None:
            self.dealt, self._scaling = step * self._named_shards, self._make([])
        else:
            self.dealt = state["dealt"]
            self._scaling = self._make([(begin, size) for begin, size in state["changes"]])


def needed_changes(
    changes: Sequence[tuple[int, int]], warmup_steps: int, named_shards: int
) -> list[tuple[int, int]]:
    """Return the (step, shards) changes that later steps depend on. Pure.

    Changes are left out before a change whose warm-up was over at the next one. The result is the
    same for a rank that has all changes and for a rank that began with the needed ones.

    Args:
        changes: in the order of their steps.
        warmup_steps: steps after a change in which the learning rate approaches its new value.
        named_shards: the shards of the batch that the script names; a first change to it is left
            out.
    """
    settled = (
        position
        for position in reversed(range(len(changes) - 1))
        if changes[position + 1][0] - changes[position][0] >= warmup_steps
    )
    rest = list(changes[next(settled, 0) :])
    return rest[1:] if rest and rest[0][1] == named_shards else rest
