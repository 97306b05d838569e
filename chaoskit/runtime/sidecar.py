"""What every rank tells all others beside its gradients: float64 numbers that arrive bit for bit.

    losses (V, by shard) | frozen | integers | presence ... | vote

``frozen`` and ``integers`` are digests that must be the same on every rank. ``presence`` has one bit a parameter:
set if one of this rank's shards gave it a gradient. Pure: knows no ranks, no reduction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
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
    """

    shard_count: int
    parameter_count: int

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
        return self.presence_at + -(-self.parameter_count // _BITS) + 1

    def write(self, losses: Mapping[int, float], *, frozen: int, integers: int, present: int, vote: int) -> Tensor:
        """One rank's sidecar, float64 of shape (size,). ``losses``: by shard. ``present``: bit i is parameter i."""
        sidecar = torch.zeros(self.size, dtype=torch.float64)
        for shard, loss in losses.items():
            sidecar[shard] = loss
        sidecar[self.frozen_at], sidecar[self.integers_at] = frozen, integers
        for place in range(self.presence_at, self.size - 1):
            sidecar[place] = present % (1 << _BITS)
            present >>= _BITS
        sidecar[-1] = vote
        return sidecar

    def present(self, sidecars: Tensor) -> int:
        """The parameters that got a gradient on any rank, as bits. ``sidecars``: (ranks, size)."""
        found = 0
        for row in sidecars[:, self.presence_at : self.size - 1].tolist():
            for place, word in enumerate(row):
                found |= int(word) << (place * _BITS)
        return found

    def agree(self, sidecars: Tensor, place: int) -> bool:
        """Whether every rank says the same at ``place``."""
        return bool((sidecars[:, place] == sidecars[0, place]).all())
