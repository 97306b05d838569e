"""The numbers of optimizers and schedulers by identity: the same objects tell, cheaply, that no number was changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
from torch.optim import Optimizer

#: Objects of these types do not change, so that the same object has the same value.
_FIXED = (float, int, bool, str, type(None), np.generic, FunctionType, Optimizer)
_TORCH_SCHEDULERS = "torch.optim.lr_scheduler"


class HeldNumbers:
    """What the groups of optimizers and the attributes of schedulers held when they were remembered.

    Where something else may hold a number, such as a tensor, or a scheduler with a ``state_dict`` of its own, nothing
    is remembered.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._can_tell = all(type(one).state_dict.__module__ == _TORCH_SCHEDULERS for one in schedulers)
        self._held: list[Collection[Any]] = []
        self._values: list[Any] | None = None

    def remember(self) -> None:
        """Remember all numbers as they are now."""
        if not self._can_tell:
            return
        before, self._held = self._values, list(self._collections())
        values = list(chain.from_iterable(self._held))
        checked = before if before is not None and len(before) == len(values) else []
        fresh = [value for value, old in zip(values, checked, strict=True) if value is not old] if checked else values
        self._values = values if self._are_followed(fresh) else None

    def forget(self) -> None:
        """Take all numbers for changed until :meth:`remember`."""
        self._values = None

    def are_unchanged(self) -> bool:
        """Return whether all are the remembered objects. False does not mean that one has another value."""
        return self._values is not None and hold_same(self._held, self._values)

    def _collections(self) -> Iterator[Collection[Any]]:
        """Yield what holds the numbers: lists, and views of dicts."""
        for optimizer in self._optimizers:
            yield optimizer.param_groups
            yield from map(dict.values, optimizer.param_groups)
        for scheduler in self._schedulers:
            attributes = vars(scheduler).values()
            yield attributes
            yield from (value for value in attributes if type(value) is list)
            for value in attributes:
                if isinstance(value, dict):
                    yield from (value.keys(), value.values())

    def _are_followed(self, values: Sequence[Any]) -> bool:
        """Return whether none of ``values`` can change without :meth:`are_unchanged` seeing it."""
        if all(map(_is_fixed, values)):
            return True
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        attributes = [value for scheduler in self._schedulers for value in vars(scheduler).values()]
        containers = [value for value in attributes if type(value) is list or isinstance(value, dict)]
        followed = set(map(id, (*groups, *(group["params"] for group in groups), *containers)))
        return all(id(value) in followed or _is_fixed(value) for value in values)


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else isinstance(value, _FIXED)


def hold_same(held: Sequence[Collection[Any]], remembered: Sequence[Any]) -> bool:
    """Return whether collections hold the same objects as before, in the same order."""
    return sum(map(len, held)) == len(remembered) and all(map(is_, chain.from_iterable(held), remembered))
