"""Seals: what makes a copy of the training state trustworthy.

A copy counts only with its seal: step, generation, size and a checksum over everything that a restore reads. The
checksum is XXH3 with 128 bits: it finds damage, not forgery (connections are authenticated), at the speed of memory.
"""

from __future__ import annotations

import struct

import msgspec
import xxhash

from chaoskit.checkpoint.layout.arena import ArenaView, decode_index
from chaoskit.checkpoint.layout.finite import NanWatch
from chaoskit.errors import ChaoskitError

#: Small enough that a chunk is still in the cache when it is hashed after it was copied.
CHUNK_BYTES = 2**22
_LOOK_BYTES = 2**19  # is still in the second-level cache when it is looked at
_HEAD = struct.Struct("!qqq")


class Torn(ChaoskitError):
    """The state was being written, or was written meanwhile: there is nothing complete to seal."""


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``step``: committed steps; ``generation``: the one that trained on this state last."""

    step: int
    generation: int
    size_bytes: int
    checksum: str

    @property
    def recency(self) -> tuple[int, int]:
        """Of two copies of one piece the one with the larger recency was made later.

        Not the age of a snapshot, which puts the step first: a later generation may go back to an older step. What it
        trains from there on replaces the copies of before (recency), but to restore, the furthest step is best (age).
        """
        return self.generation, self.step


class Checksum:
    """Digest of a state: its step, index and scalars first, then its data in any number of pieces."""

    def __init__(self, step: int, index: bytes, scalars: bytes) -> None:
        self._hash = xxhash.xxh3_128(_HEAD.pack(step, len(index), len(scalars)))
        self._hash.update(index)
        self._hash.update(scalars)

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def checksum(step: int, index: bytes, scalars: bytes, data: memoryview) -> str:
    """The checksum of a whole state."""
    digest = Checksum(step, index, scalars)
    for start in range(0, len(data), CHUNK_BYTES):
        digest.update(data[start : start + CHUNK_BYTES])
    return digest.hexdigest()


def seal(view: ArenaView) -> Seal:
    """Seal a state where it lies. To be called when its writer has ended, or may be retried.

    Raises:
        Torn: if the writer was in the middle of an update, or began one meanwhile. Poisoned: if there is NaN in it.
    """
    sequence = view.sequence
    if sequence % 2:
        raise Torn(f"the update after step {view.step} was not finished")
    step, generation, index, data = view.step, view.generation, view.index_bytes(), view.data()
    digest, watch = (
        Checksum(step, index, view.scalars_bytes()),
        NanWatch(decode_index(index, len(data))),
    )
    for start in range(0, len(data), _LOOK_BYTES):
        chunk = data[start : start + _LOOK_BYTES]
        digest.update(chunk)
        watch.look(start, chunk)
    if view.sequence != sequence:
        raise Torn(f"step {step} was left while it was sealed")
    return Seal(step, generation, len(data), digest.hexdigest())
