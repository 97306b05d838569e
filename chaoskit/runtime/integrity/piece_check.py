"""What a rank of a sharded job says of its piece of the state, where other ranks hold replicas of that piece (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chaoskit.config import RunConfig
from chaoskit.runtime.integrity.slice_memory import SliceMemory
from chaoskit.runtime.integrity.voting import Seal
from chaoskit.runtime.reduction.checksums import checksum, join, size_bytes, slice_checksum
from chaoskit.runtime.state.sharding import ShardedState

_SLICE_BYTES = 2**20  # a smaller slice is not read faster: what starts each reading takes as long
_SELF_BYTES = (
    2**23
)  # of its own piece that one of two replicas compares with itself in a step: half a millisecond


class PieceCheck:
    """The seal that a rank shows in the ballot of each step, of the piece that it holds in one entry.

    Args:
        state: restored already.
        replicas: ranks that hold this piece, this one included.
        heir: the piece is a copy of another worker's, which may have been corrupt already.
    """

    def __init__(
        self, state: ShardedState, config: RunConfig, replicas: int, *, heir: bool
    ) -> None:
        self._state, self._every = state, config.state_hash_steps if replicas > 1 else 0
        # the step by which every slice of a copied piece will have been compared
        self._heir_until = state.step + self._parts(state.piece()) if heir and self._every else 0
        # two have no majority: one must convict itself
        self._memory = SliceMemory() if replicas == 2 and self._every else None
        self._remember(state.step)

    def seal(self) -> Seal:
        """What replicas compare. Only a commit changes the state, so it may be read while a step is under way."""
        if not self._every:
            return Seal()
        tensors, step = self._state.piece(), self._state.step
        parts = self._parts(tensors)
        due = step % parts
        now = slice_checksum(tensors, due, parts)

        def digest(part: int) -> int:
            return now if part == due else slice_checksum(tensors, part, parts)

        torn = self._memory is not None and self._memory.is_contradicted(step, due, digest)
        # the piece as it was built is compared whole: nothing wrong is committed
        compared = now if step else checksum(tensors)
        word = join(compared, self._state.scalars_checksum())
        return Seal(state=word, torn=int(torn), heir=int(step < self._heir_until))

    def updated(self) -> None:
        """The optimizers have run: the state is the one after the next commit, and nothing else has touched it yet."""
        self._remember(self._state.step + 1)

    def written(self) -> None:
        """The script has written into the state behind the newest commit."""
        self._remember(self._state.step)

    def _remember(self, step: int) -> None:
        """Keep digests of the state after ``step`` steps: of the slice due next, and of others if they are small."""
        if self._memory is None:
            return
        tensors = self._state.piece()
        parts = self._parts(tensors)
        self._memory.settle(
            (step - 1) % parts
        )  # all replicas had the same, or the step would not be committed
        count = max(1, min(parts, _SELF_BYTES * parts // max(1, size_bytes(tensors))))
        own = [(step + distance) % parts for distance in range(count)]
        self._memory.remember(step, {part: slice_checksum(tensors, part, parts) for part in own})

    def _parts(self, tensors: Sequence[Tensor]) -> int:
        """The slices of the piece: one, where it is small. The same number on all ranks that hold it."""
        return max(1, min(self._every, size_bytes(tensors) // _SLICE_BYTES))
