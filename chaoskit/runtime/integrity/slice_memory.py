"""Digests of slices of a state right after a commit.

Only a commit changes the state. A slice whose digest differs before the next commit was damaged in
between. Two holders of one state have no majority, so each of them remembers its own digests.

-> integrity/rank_checks.py and piece_check.py: which slices, and when; voting.py: the blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class SliceMemory:
    """The digests that one holder remembers of its own state. Pure: without tensors."""

    def __init__(self) -> None:
        self._step = -1
        self._digests: Mapping[int, int] = {}  # by slice, right after the commit of ``_step`` steps
        self._torn: set[int] = set()  # changed slices that were not compared since

    def remember(self, step: int, digests: Mapping[int, int]) -> None:
        """Remember the digests of some slices of the state after ``step`` steps."""
        self._step, self._digests = step, digests

    def settle(self, part: int) -> bool:
        """Record that all holders have the same slice ``part``. Return whether it had changed."""
        changed = part in self._torn
        self._torn.discard(part)
        return changed

    def forget(self) -> None:
        """Forget everything, because the state was replaced."""
        self._step, self._digests = -1, {}
        self._torn.clear()

    def is_contradicted(self, step: int, due: int, digest: Callable[[int], int]) -> bool:
        """Return whether the state has changed between two commits.

        Slice ``due`` counts, and slices that were not compared since they changed. Other changed
        slices are noted, and count from now on.

        A wrong number of the optimizer makes weights wrong in other slices, which may be compared
        before its own.

        Args:
            step: committed steps. Remembered slices of another step are not compared.
            digest: returns the current digest of a slice.
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
