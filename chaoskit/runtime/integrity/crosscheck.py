"""A round that computes a shard again whose two computations differ, to find the faulty rank.

-> step/inquiry.py runs the round, and step/trainer.py acts on its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from chaoskit.runtime.integrity.nonfinite_guard import AuditResult
from chaoskit.runtime.integrity.voting import Pair, judge, panel
from chaoskit.runtime.reduction.checksums import checksum


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """The finding of one rank.

    Attributes:
        checksum: of its gradient of the shard; 0 if it did not compute it.
        attempts: as in :class:`~chaoskit.runtime.integrity.nonfinite_guard.AuditFinding`.
    """

    checksum: int
    attempts: int


_words = msgspec.msgpack.Decoder(_Word)


@dataclass(slots=True)
class CrossCheck:
    """A round of recomputation of one shard, by its owner, its auditor and a referee.

    It has the interface of :class:`~chaoskit.runtime.integrity.nonfinite_guard.Audit`.

    Attributes:
        pair: the shard with its owner and auditor.
        first: the earlier checksums of owner and auditor, by rank.
        world: the number of ranks.
    """

    pair: Pair
    first: dict[int, int]
    world: int
    _checksum: int = field(default=0)

    def shards_for(self, rank: int) -> list[int]:
        """Return the shards that ``rank`` recomputes."""
        return [self.pair.shard] if rank in panel(self.pair, self.world) else []

    def record(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """Record this rank's new gradients of the shard."""
        self._checksum = checksum(gradients)

    def finding(self, healthy: bool, attempts: int) -> bytes:
        """Return this rank's part of the result, to be exchanged with all others.

        Args:
            healthy: not used; it belongs to the common interface.
            attempts: the number of audits of this step before.
        """
        return msgspec.msgpack.encode(_Word(self._checksum, attempts))

    def conclude(self, encoded: Sequence[bytes]) -> AuditResult:
        """Return the result that follows from the findings of all ranks."""
        words = [_words.decode(data) for data in encoded]
        verdict, ranks = judge(
            self.first, {rank: words[rank].checksum for rank in panel(self.pair, self.world)}
        )
        return AuditResult(
            verdict, ranks, (self.pair.shard,), max(word.attempts for word in words), "corrupt"
        )
