"""Remembers the number objects of optimizers and schedulers. If all are still the same, no number has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from torch.optim import Optimizer

from chaoskit.runtime.state.held_objects import HeldObjects, are_identical

#: Objects of these types do not change, so that the same object has the same value.
_FIXED = (float, int, bool, str, type(None), np.generic, FunctionType, Optimizer)
_TORCH_SCHEDULERS = "torch.optim.lr_scheduler"


class HeldNumbers:
    """The objects in the groups of optimizers and the attributes of schedulers when they were remembered.

    Nothing is remembered where a number may be elsewhere, such as in a tensor or in a scheduler with a ``state_dict``
    of its own. The state of the optimizers is followed, too: it must hold no number when this remembers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._can_tell = all(map(_has_state_of_torch, schedulers))
        self._owners: list[tuple[Any, ...]] = []
        self._numbers: HeldObjects | None = None
        self._states = HeldObjects([])

    def remember(self) -> None:
        """Remember all numbers as they are now."""
        if not self._can_tell:
            return
        before = self._numbers.objects if self._numbers is not None else []
        numbers = HeldObjects(list(self._collections()))
        is_alike = len(before) == len(numbers.objects)
        pairs = zip(
            numbers.objects, before if is_alike else [None] * len(numbers.objects), strict=True
        )
        fresh = [value for value, old in pairs if value is not old]
        self._numbers = numbers if self._are_followed(fresh) else None
        self._owners = self._current_owners()
        self._states = HeldObjects(list(self._state_views()))

    def forget(self) -> None:
        """Treat all numbers as changed until the next call of :meth:`remember`."""
        self._numbers = None

    def are_unchanged(self) -> bool:
        """Return whether all are the remembered objects. False does not mean that one has another value."""
        return (
            self._numbers is not None
            and all(map(are_identical, self._current_owners(), self._owners))
            and self._numbers.are_same()
            and self._states.are_same()
        )

    def _current_owners(self) -> list[tuple[Any, ...]]:
        """Return what a script may replace as a whole, as ``Optimizer.load_state_dict`` does."""
        of_optimizers = [
            (optimizer.param_groups, optimizer.state) for optimizer in self._optimizers
        ]
        return [*of_optimizers, *((vars(scheduler),) for scheduler in self._schedulers)]

    def _collections(self) -> Iterator[Collection[Any]]:
        """Yield what holds the numbers: lists, and views of dicts."""
        for optimizer in self._optimizers:
            yield optimizer.param_groups
            for group in optimizer.param_groups:
                yield from (group.keys(), group.values())
        for scheduler in self._schedulers:
            attributes = vars(scheduler)
            yield from (attributes.keys(), attributes.values())
            yield from (value for value in attributes.values() if type(value) is list)
            for value in attributes.values():
                if isinstance(value, dict):
                    yield from (value.keys(), value.values())

    def _state_views(self) -> Iterator[Collection[Any]]:
        """Yield views of the state, which holds tensors alone: a number may be added to it."""
        for optimizer in self._optimizers:
            yield optimizer.state.values()
            yield from (
                held.values() for held in optimizer.state.values() if isinstance(held, dict)
            )

    def _are_followed(self, values: Sequence[Any]) -> bool:
        """Return whether none of ``values`` can change without :meth:`are_unchanged` seeing it."""
        if all(map(_is_fixed, values)):
            return True
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        attributes = [value for scheduler in self._schedulers for value in vars(scheduler).values()]
        containers = [
            value for value in attributes if type(value) is list or isinstance(value, dict)
        ]
        followed = set(map(id, (*groups, *(group["params"] for group in groups), *containers)))
        return all(id(value) in followed or _is_fixed(value) for value in values)


def _has_state_of_torch(scheduler: Any) -> bool:
    method = scheduler.state_dict
    is_own = getattr(method, "__self__", None) is scheduler
    return is_own and getattr(method.__func__, "__module__", "") == _TORCH_SCHEDULERS


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else isinstance(value, _FIXED)
