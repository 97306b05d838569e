"""The memory tier: sealed copies of the training state in shared memory that outlives the worker.

Two slots, reused: while one is written the other holds the newest complete copy, so there is one at every moment after
the first. A slot is laid out like an arena, and is read in the same way. What other tiers must offer as well is
:class:`Tier`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaImage, ArenaView, decode_index
from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.finite import NanWatch
from chaoskit.checkpoint.layout.seal import CHUNK_BYTES, Checksum, Seal, Torn


class Copy(NamedTuple):
    """A sealed state and where it can be read."""

    seal: Seal
    view: ArenaView


class Tier(Protocol):
    """A place where copies are kept. A copy is complete or invisible; only the newest few are kept."""

    name: str

    def save(self, source: ArenaView) -> Seal:
        """Copy the state that ``source`` holds, and seal the copy. Until then nothing of it can be seen.

        Raises:
            Poisoned: if there is NaN in it. The copies from before are untouched.
            Torn: if the state changed while it was copied. The copies from before are untouched.
            MemoryError, OSError: if there is no room. The same holds.
        """

    def copies(self) -> list[Copy]:
        """What can be restored, the newest first."""


class MemoryTier:
    """Two slots in this process's shared memory. One thread saves; others may read what is offered.

    Args:
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.MEMORY`.
    """

    name = "memory"

    def __init__(self, at: Hook = undisturbed) -> None:
        self._at = at
        self._slots: list[ArenaImage] = []
        self._newest: Copy | None = None

    def reserve(self, source: ArenaView) -> None:
        """Make room for the state of ``source`` ahead of time, so that no copy waits for fresh pages.

        Raises:
            MemoryError, OSError: if there is none.
        """
        while len(self._slots) < 2:
            self._slots.append(_touched(source))

    def save(self, source: ArenaView) -> Seal:
        """See :class:`Tier`."""
        self.reserve(source)
        number = next(
            n
            for n, slot in enumerate(self._slots)
            if self._newest is None or slot is not self._newest.view
        )
        if self._slots[number].capacity_bytes < source.size_bytes:
            self._slots[number] = _touched(source)
        slot = self._slots[number]
        sealed = _copy(source, slot, self._at)
        self._newest = Copy(sealed, slot)
        self._at("sealed")
        return sealed

    def copies(self) -> list[Copy]:
        """See :class:`Tier`. One at most: the other slot is the next to be overwritten."""
        return [self._newest] if self._newest is not None else []


def _touched(source: ArenaView) -> ArenaImage:
    """An image with room for ``source``, every page of which is mapped: its first copy is as fast as any other."""
    image, done = ArenaImage(source.size_bytes), 0
    while done < source.size_bytes:
        start = DATA_OFFSET + done
        done += source.read_into(
            image.bytes[start : start + min(CHUNK_BYTES, source.size_bytes - done)], done
        )
    return image


def _copy(source: ArenaView, target: ArenaImage, at: Hook) -> Seal:
    sequence = source.sequence
    if sequence % 2:
        raise Torn(f"the update after step {source.step} is under way")
    step, generation, size_bytes = source.step, source.generation, source.size_bytes
    index, scalars = source.index_bytes(), source.scalars_bytes()
    target.begin(step, generation, index, scalars, size_bytes)
    at("begun")
    digest, data, done = Checksum(step, index, scalars), target.data(), 0
    watch = NanWatch(decode_index(index, size_bytes))
    while done < size_bytes:
        chunk = data[done : done + CHUNK_BYTES]
        count = source.read_into(chunk, done)
        digest.update(chunk[:count])
        at("chunk")
        watch.look(done, chunk[:count])
        done += count
        if (
            source.sequence != sequence
        ):  # now and not at the end: the writer may be waiting for this copy to be over
            raise Torn(f"step {step} was left before its copy was complete")
    if source.sequence != sequence:
        raise Torn(f"step {step} was left before its copy was complete")
    at("copied")
    target.end()
    return Seal(step, generation, size_bytes, digest.hexdigest())
