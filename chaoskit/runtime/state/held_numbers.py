"""The number objects of optimizers and schedulers, remembered by identity.

If all objects are still the same, no number has changed.

-> state/replica.py then uses the encoded numbers of the last commit again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from torch.optim import Optimizer

from chaoskit.runtime.state.held_objects import HeldObjects, are_identical

#: Immutable types: the same object has the same value.
_FIXED = (float, int, bool, str, type(None), np.generic, FunctionType, Optimizer)
_TORCH_SCHEDULERS = "torch.optim.lr_scheduler"


class HeldNumbers:
    """The remembered objects in the groups of optimizers and the attributes of schedulers.

    Nothing is remembered if a number may be elsewhere, such as in a tensor or in a scheduler with
    its own ``state_dict``. The state of the optimizers is followed as well: it must contain no
    number when this remembers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._can_remember = all(map(_has_state_of_torch, schedulers))
        self._owners: list[tuple[Any, ...]] = []
        self._numbers: HeldObjects | None = None
        self._states = HeldObjects([])

    def remember(self) -> None:
        """Remember all numbers as they are now, unless some change would not be noticed."""
        if not self._can_remember:
            return
        before = self._numbers.objects if self._numbers is not None else []
        numbers = HeldObjects(list(self._collections()))
        is_alike = len(before) == len(numbers.objects)
        pairs = zip(
            numbers.objects, before if is_alike else [None] * len(numbers.objects), strict=True
        )
        new_objects = [number for number, former in pairs if number is not former]
        self._numbers = numbers if self._are_followed(new_objects) else None
        self._owners = self._current_owners()
        self._states = HeldObjects(list(self._state_views()))

    def forget(self) -> None:
        """Treat all numbers as changed until the next call of :meth:`remember`."""
        self._numbers = None

    def are_unchanged(self) -> bool:
        """Return whether all objects are the remembered ones.

        False does not mean that a value has changed.
        """
        return (
            self._numbers is not None
            and all(map(are_identical, self._current_owners(), self._owners))
            and self._numbers.are_same()
            and self._states.are_same()
        )

    def _current_owners(self) -> list[tuple[Any, ...]]:
        """Return the containers that a script may replace as a whole.

        ``Optimizer.load_state_dict`` does that, for example.
        """
        of_optimizers = [
            (optimizer.param_groups, optimizer.state) for optimizer in self._optimizers
        ]
        return [*of_optimizers, *((vars(scheduler),) for scheduler in self._schedulers)]

    def _collections(self) -> Iterator[Collection[Any]]:
        """Yield the collections that hold the numbers: lists, and views of dicts."""
        for optimizer in self._optimizers:
            yield optimizer.param_groups
            for group in optimizer.param_groups:
                yield from (group.keys(), group.values())
        for scheduler in self._schedulers:
            attributes = vars(scheduler)
            yield from (attributes.keys(), attributes.values())
            yield from (attribute for attribute in attributes.values() if type(attribute) is list)
            for attribute in attributes.values():
                if isinstance(attribute, dict):
                    yield from (attribute.keys(), attribute.values())

    def _state_views(self) -> Iterator[Collection[Any]]:
        """Yield views of the state. It holds only tensors, but a number may be added to it."""
        for optimizer in self._optimizers:
            yield optimizer.state.values()
            yield from (
                held.values() for held in optimizer.state.values() if isinstance(held, dict)
            )

    def _are_followed(self, values: Sequence[Any]) -> bool:
        """Return whether a change of any of ``values`` is noticed by :meth:`are_unchanged`."""
        if all(map(_is_fixed, values)):
            return True
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        attributes = [
            attribute for scheduler in self._schedulers for attribute in vars(scheduler).values()
        ]
        containers = [
            attribute
            for attribute in attributes
            if type(attribute) is list or isinstance(attribute, dict)
        ]
        followed_ids = set(map(id, (*groups, *(group["params"] for group in groups), *containers)))
        return all(id(attribute) in followed_ids or _is_fixed(attribute) for attribute in values)


def _has_state_of_torch(scheduler: Any) -> bool:
    """Return whether ``state_dict`` of a scheduler is torch's own."""
    method = scheduler.state_dict
    is_own = getattr(method, "__self__", None) is scheduler
    return is_own and getattr(method.__func__, "__module__", "") == _TORCH_SCHEDULERS


def _is_fixed(value: Any) -> bool:
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else isinstance(value, _FIXED)
