"""A round in which a shard whose two computations differ is computed once more, to find out who computes wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from chaoskit.runtime.integrity.guard import AuditResult
from chaoskit.runtime.integrity.voting import Pair, judge, panel
from chaoskit.runtime.reduction.checksums import checksum


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """The shard's checksum as one rank found it now; 0 if it did not compute it. ``attempts``: as in a Finding."""

    checksum: int
    attempts: int


_words = msgspec.msgpack.Decoder(_Word)


@dataclass(slots=True)
class CrossCheck:
    """``first``: what owner and auditor found before. Has the interface of
    :class:`~chaoskit.runtime.integrity.guard.Audit`.
    """

    pair: Pair
    first: dict[int, int]
    world: int
    _checksum: int = field(default=0)

    def shards_for(self, rank: int) -> list[int]:
        """What ``rank`` recomputes."""
        return [self.pair.shard] if rank in panel(self.pair, self.world) else []

    def record(self, shard: int, gradients: Sequence[Tensor | None]) -> None:
        """This rank's gradients of the shard, computed again."""
        self._checksum = checksum(gradients)

    def finding(self, healthy: bool, attempts: int) -> bytes:
        """This rank's part of the result, to be exchanged with all others."""
        return msgspec.msgpack.encode(_Word(self._checksum, attempts))

    def conclude(self, found: Sequence[bytes]) -> AuditResult:
        """What follows from the findings of all ranks."""
        words = [_words.decode(data) for data in found]
        verdict, ranks = judge(
            self.first, {rank: words[rank].checksum for rank in panel(self.pair, self.world)}
        )
        return AuditResult(
            verdict, ranks, (self.pair.shard,), max(word.attempts for word in words), "corrupt"
        )
