"""Digests of slices of a state right after a commit: a slice that differs before the next one was changed in between.

Only a commit changes the state. Two holders of one state have no majority, so each of them remembers what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class SliceMemory:
    """What one holder remembers of its own state. Pure: knows no tensors."""

    def __init__(self) -> None:
        self._step = -1
        self._digests: Mapping[int, int] = {}  # by slice, right after the commit of ``_step`` steps
        self._torn: set[int] = (
            set()
        )  # slices that changed between a commit and the next, and were not compared since

    def remember(self, step: int, digests: Mapping[int, int]) -> None:
        """Some slices of the state after ``step`` steps."""
        self._step, self._digests = step, digests

    def settle(self, part: int) -> bool:
        """All holders turned out to have the same slice ``part``. Returns whether it had changed in between."""
        changed = part in self._torn
        self._torn.discard(part)
        return changed

    def forget(self) -> None:
        """The state is another one now."""
        self._step, self._digests = -1, {}
        self._torn.clear()

    def is_contradicted(self, step: int, due: int, digest: Callable[[int], int]) -> bool:
        """Whether the state has changed between two commits, in slice ``due`` or in one that was not compared since.

        A wrong number of the optimizer makes weights wrong that lie in other slices, whose turn may come before.

        Args:
            step: committed steps.
            digest: of a slice as it is now.
        """
        torn = False
        if step == self._step:
            for part, before in self._digests.items():
                if before == digest(part):
                    continue
                if part == due:
                    torn = True
                else:
                    self._torn.add(part)
        return torn or bool(self._torn)
