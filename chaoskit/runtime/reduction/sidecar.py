"""What every rank tells all others beside its gradients: float64 numbers that arrive bit for bit.

    losses (V, by shard) | frozen | integers | presence ... | vote | seal ...

``frozen`` and ``integers`` are digests that must be the same on every rank. ``presence`` has one bit a parameter:
set if one of this rank's shards gave it a gradient. ``seal``: int64 words, as bits. Pure: knows no ranks, no reduction.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 48  # in one float64, which is exact up to 2**53


def digest(data: bytes) -> int:
    """A number below 2**48 that differs, all but certainly, where the bytes do (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=_BITS // 8).digest(), "big")


@dataclass(frozen=True)
class SidecarLayout:
    """Where each number lies.

    Args:
        shard_count: V.
        parameter_count: trained parameters.
        seal_size: words of a seal.
    """

    shard_count: int
    parameter_count: int
    seal_size: int = 0

    @property
    def frozen_at(self) -> int:
        return self.shard_count

    @property
    def integers_at(self) -> int:
        return self.shard_count + 1

    @property
    def presence_at(self) -> int:
        return self.shard_count + 2

    @property
    def size(self) -> int:
        """Of one rank's sidecar, in float64."""
        return self.vote_at + 1 + self.seal_size

    @property
    def vote_at(self) -> int:
        return self.presence_at + -(-self.parameter_count // _BITS)

    def write(
        self,
        losses: Mapping[int, float],
        *,
        frozen: int,
        integers: int,
        present: int,
        vote: int,
        seal: Sequence[int] = (),
    ) -> Tensor:
        """One rank's sidecar, float64 of shape (size,). ``losses``: by shard. ``present``: bit i is parameter i."""
        numbers = [0.0] * self.shard_count
        for shard, loss in losses.items():
            numbers[shard] = loss
        numbers += (frozen, integers)
        for _ in range(self.presence_at, self.vote_at):
            numbers.append(present % (1 << _BITS))
            present >>= _BITS
        numbers.append(vote)
        if len(seal) not in (0, self.seal_size):
            raise ValueError(f"a seal of {len(seal)} words, where the layout has {self.seal_size}")
        words = seal or [0] * self.seal_size
        data = bytearray(struct.pack(f"={len(numbers)}d{len(words)}q", *numbers, *words))
        return torch.frombuffer(data, dtype=torch.float64)

    def present(self, sidecars: Tensor) -> int:
        """The parameters that got a gradient on any rank, as bits. ``sidecars``: (ranks, size)."""
        found = 0
        for row in sidecars[:, self.presence_at : self.vote_at].tolist():
            for place, word in enumerate(row):
                found |= int(word) << (place * _BITS)
        return found

    def lowest_vote(self, sidecars: Tensor) -> int:
        """The newest generation that every rank knows."""
        return int(sidecars[:, self.vote_at].min())

    def seals(self, sidecars: Tensor) -> list[list[int]]:
        """The words of every rank's seal."""
        words: list[list[int]] = sidecars.view(torch.int64)[:, self.vote_at + 1 :].tolist()
        return words

    def agree(self, sidecars: Tensor, place: int) -> bool:
        """Whether every rank says the same at ``place``."""
        return bool((sidecars[:, place] == sidecars[0, place]).all())
