"""Seals: the proof that a copy of the training state is complete and undamaged.

A copy is valid only with its seal: step, generation, size and a checksum over all data that a
restore reads. The checksum is XXH3 with 128 bits, which runs at the speed of memory. It detects
damage, not forgery; connections are authenticated.

-> ``memory/snapshotter.py`` and ``memory/tier.py``: seal copies.
-> ``memory/stored.py`` and ``runtime/state/peer.py``: compare a copy with its seal.
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
_LOOK_BYTES = 2**19  # still in the second-level cache for the check for NaN
_HEAD = struct.Struct("!qqq")


class Torn(ChaoskitError):
    """The state was written during the operation: there is nothing complete to seal."""


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seal of a copy.

    Attributes:
        step: number of committed steps.
        generation: the last generation that trained on this state. It is not in the checksum.
        size_bytes: size of the data.
        checksum: checksum of step, index, scalars and data; "" if there is none yet.
    """

    step: int
    generation: int
    size_bytes: int
    checksum: str

    @property
    def recency(self) -> tuple[int, int]:
        """Sort key: of two copies of one piece, the copy with the larger recency was made later.

        This differs from the age of a snapshot, which puts the step first. A later generation may
        go back to an older step, and its copies replace the earlier ones (recency). To restore, the
        furthest step is best (age).
        """
        return self.generation, self.step


class Checksum:
    """Digest of a state: its step, index and scalars first, then its data in pieces."""

    def __init__(self, step: int, index: bytes, scalars: bytes) -> None:
        self._hash = xxhash.xxh3_128(_HEAD.pack(step, len(index), len(scalars)))
        self._hash.update(index)
        self._hash.update(scalars)

    def update(self, data: memoryview) -> None:
        """Add the next piece of data."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """Return the checksum of everything added so far, in hexadecimal."""
        return self._hash.hexdigest()


def checksum(step: int, index: bytes, scalars: bytes, data: memoryview) -> str:
    """Return the checksum of a whole state, in hexadecimal."""
    digest = Checksum(step, index, scalars)
    for start in range(0, len(data), CHUNK_BYTES):
        digest.update(data[start : start + CHUNK_BYTES])
    return digest.hexdigest()


def seal(view: ArenaView) -> Seal:
    """Return the seal of a state, computed in place. The state itself is not changed.

    Call this when its writer has ended, or repeat it after Torn.

    Raises:
        Torn: if the writer was in the middle of an update, or began one meanwhile.
        Poisoned: if there is NaN in the state. Infinity is accepted.
        ChaoskitError: if the index of the state is damaged.
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
        raise Torn(f"step {step} was changed while it was sealed")
    return Seal(step, generation, len(data), digest.hexdigest())
