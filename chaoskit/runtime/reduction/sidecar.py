"""The sidecar of a reduction: a few float64 of every rank that arrive bit for bit.

    losses (V, by shard) | frozen | integers | presence ... | vote | seal ...

``frozen`` and ``integers`` are digests that must be the same on every rank. ``presence`` has one
bit a parameter, which is set if one of this rank's shards gave it a gradient. ``vote`` is the
newest generation that this rank knows. ``seal`` are int64 words, as bits. Pure: without ranks and
reductions.

-> step/shardwork.py fills the sidecar in, and compares those of all ranks. integrity/voting.py: the
words of a seal. group/regroup.py: the use of the votes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = 48  # per float64, which is exact up to 2**53


def digest(data: bytes) -> int:
    """Return a number below 2**48 that identifies the bytes (BLAKE2b)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=_BITS // 8).digest(), "big")


@dataclass(frozen=True)
class SidecarLayout:
    """The position of each number in a sidecar.

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
        """The size of one rank's sidecar, in float64."""
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
        """Return one rank's sidecar, float64 of shape (size,).

        Args:
            losses: by shard.
            present: the parameters with a gradient; bit i is parameter i.
            seal: its int64 words; zeros are written if it is empty.

        Raises:
            ValueError: if the seal is neither empty nor as long as the layout says.
        """
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
        """Return the parameters that got a gradient on any rank, as bits.

        Args:
            sidecars: of shape (ranks, size).
        """
        bits = 0
        for row in sidecars[:, self.presence_at : self.vote_at].tolist():
            for word_index, word in enumerate(row):
                bits |= int(word) << (word_index * _BITS)
        return bits

    def lowest_vote(self, sidecars: Tensor) -> int:
        """Return the lowest vote: the newest generation of which every rank has the plan."""
        return int(sidecars[:, self.vote_at].min())

    def seals(self, sidecars: Tensor) -> list[list[int]]:
        """Return the int64 words of every rank's seal, by rank."""
        words: list[list[int]] = sidecars.view(torch.int64)[:, self.vote_at + 1 :].tolist()
        return words

    def agree(self, sidecars: Tensor, position: int) -> bool:
        """Return whether all ranks have the same number at ``position``."""
        return bool((sidecars[:, position] == sidecars[0, position]).all())
