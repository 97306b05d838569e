"""The checks of a rank's piece of the state, if other ranks hold replicas of the piece (HSDP).

-> integrity/ballot.py compares the seals; voting.py has the class of a seal.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.runtime.integrity.slice_memory import SliceMemory
from chaoskit.runtime.integrity.voting import RankSeal
from chaoskit.runtime.reduction.checksums import checksum, join, size_bytes, slice_checksum
from chaoskit.runtime.state.sharding import ShardedState

_SLICE_BYTES = 2**20  # a smaller slice is not read faster, as starting each read takes as long
_SELF_BYTES = 2**23  # compared with itself by one of two replicas in a step: half a millisecond


class PieceCheck:
    """The seal that a rank shows in the ballot of each step, for its piece of the state.

    Args:
        state: the restored state.
        replicas: the number of ranks that hold this piece, including this one.
        heir: the piece is a copy of another worker's, which may have been corrupt already.
    """

    def __init__(
        self, state: ShardedState, config: RunConfig, replicas: int, *, heir: bool
    ) -> None:
        self._state, self._part_count_max = state, config.state_hash_steps if replicas > 1 else 0
        # the step at which every slice of a copied piece will have been compared
        self._heir_until = (
            state.step + self._parts(state.piece()) if heir and self._part_count_max else 0
        )
        # two replicas have no majority: the faulty one must find its own error
        self._memory = SliceMemory() if replicas == 2 and self._part_count_max else None
        self._remember(state.step)

    def seal(self) -> RankSeal:
        """Return the seal that replicas compare.

        It is empty if no other rank holds this piece, or if ``state_hash_steps`` is 0. Nothing
        changes the state while a step is in progress, so it can be read then.
        """
        if not self._part_count_max:
            return RankSeal()
        tensors, step = self._state.piece(), self._state.step
        parts = self._parts(tensors)
        due = step % parts
        due_checksum = slice_checksum(tensors, due, parts)

        def digest(part: int) -> int:
            return due_checksum if part == due else slice_checksum(tensors, part, parts)

        torn = self._memory is not None and self._memory.is_contradicted(step, due, digest)
        # the initial piece is compared as a whole, so that nothing wrong is committed
        compared = due_checksum if step else checksum(tensors)
        word = join(compared, self._state.scalars_checksum())
        return RankSeal(state=word, torn=int(torn), heir=int(step < self._heir_until))

    def updated(self) -> None:
        """Remember the state after the optimizers have run, before anything else can change it.

        Does nothing unless exactly two ranks hold the piece.
        """
        self._remember(self._state.step + 1)

    def written(self) -> None:
        """Remember the state after the script has written into it.

        Does nothing unless exactly two ranks hold the piece.
        """
        self._remember(self._state.step)

    def _remember(self, step: int) -> None:
        """Keep digests of the state after ``step`` steps.

        They are of the slice that is due next, and of more slices if these are small.
        """
        if self._memory is None:
            return
        tensors = self._state.piece()
        parts = self._parts(tensors)
        self._memory.settle((step - 1) % parts)  # the step was committed: all replicas were equal
        count = max(1, min(parts, _SELF_BYTES * parts // max(1, size_bytes(tensors))))
        own_parts = [(step + distance) % parts for distance in range(count)]
        self._memory.remember(
            step, {part: slice_checksum(tensors, part, parts) for part in own_parts}
        )

    def _parts(self, tensors: Sequence[Tensor]) -> int:
        """Return the number of slices of the piece, the same on all ranks that hold it."""
        return max(1, min(self._part_count_max, size_bytes(tensors) // _SLICE_BYTES))
