"""The objects in collections, remembered by identity."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from operator import is_
from typing import Any


class HeldObjects:
    """The objects that some collections held when this was made.

    Args:
        containers: lists, and views of dicts, which show later changes.

    Attributes:
        objects: all objects, in order.
    """

    def __init__(self, containers: Sequence[Collection[Any]]) -> None:
        self._containers = containers
        self._sizes = list(map(len, containers))
        self.objects = list(chain.from_iterable(containers))

    def are_same(self) -> bool:
        """Return whether each collection holds the same objects, in the same order."""
        same_sizes = list(map(len, self._containers)) == self._sizes
        return same_sizes and all(map(is_, chain.from_iterable(self._containers), self.objects))


def are_identical(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects, in the same order."""
    return len(now) == len(before) and all(map(is_, now, before))
