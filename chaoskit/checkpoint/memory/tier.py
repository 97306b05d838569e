"""Memory tier: sealed copies of the training state in shared memory that outlives the worker.

Two slots are reused: while one is written, the other holds the newest complete copy. There is thus
always a complete copy after the first. A slot is laid out and read like an arena.
:class:`Tier` is the interface of all such tiers.

-> ``daemon/replica_keeper.py``: copies a replicated state into it. ``daemon/copy_budget.py``: when.
-> ``memory/snapshotter.py``: copies of a sharded state, which a worker makes itself.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from chaoskit.checkpoint.layout.arena import DATA_OFFSET, ArenaImage, ArenaView, decode_index
from chaoskit.checkpoint.layout.boundaries import Hook, undisturbed
from chaoskit.checkpoint.layout.finite import NanWatch
from chaoskit.checkpoint.layout.seal import CHUNK_BYTES, Checksum, Seal, Torn


class Copy(NamedTuple):
    """A sealed state and a view of its memory."""

    seal: Seal
    view: ArenaView


class Tier(Protocol):
    """The interface of a place that makes and keeps sealed copies of a state.

    A copy is complete or invisible; only the newest few are kept.
    """

    name: str

    def save(self, source: ArenaView) -> Seal:
        """Copy the state that ``source`` holds, seal the copy, and return the seal.

        The copy is invisible until it is sealed. The newest earlier copy is untouched by an error.

        Raises:
            Poisoned: if there is NaN in the state.
            Torn: if the state changed while it was copied.
            MemoryError, OSError: if there is no room.
            ChaoskitError: if the index of the state is damaged or too large.
        """

    def copies(self) -> list[Copy]:
        """Return the copies that can be restored, the newest first."""


class MemoryTier:
    """A memory tier in two slots of this process. One thread saves; others may read the copies.

    Args:
        at: called at each of :data:`~chaoskit.checkpoint.layout.boundaries.MEMORY`.
    """

    name = "memory"

    def __init__(self, at: Hook = undisturbed) -> None:
        self._at = at
        self._slots: list[ArenaImage] = []
        self._newest: Copy | None = None

    def reserve(self, source: ArenaView) -> None:
        """Make room for the state of ``source``, so that no copy waits for fresh pages.

        Slots that exist are left as they are; :meth:`save` replaces one that is too small.

        Raises:
            MemoryError, OSError: if there is no room.
        """
        while len(self._slots) < 2:
            self._slots.append(_touched(source))

    def save(self, source: ArenaView) -> Seal:
        """Copy and seal a state, and return the seal; see :meth:`Tier.save`."""
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
        """Return at most one copy, because the other slot is the next to be overwritten."""
        return [self._newest] if self._newest is not None else []


def _touched(source: ArenaView) -> ArenaImage:
    """Return an image with room for ``source``. Its pages are mapped, for a fast first copy."""
    image, done = ArenaImage(source.size_bytes), 0
    while done < source.size_bytes:
        start = DATA_OFFSET + done
        done += source.read_into(
            image.bytes[start : start + min(CHUNK_BYTES, source.size_bytes - done)], done
        )
    return image


def _copy(source: ArenaView, target: ArenaImage, at: Hook) -> Seal:
    """Copy the state of ``source`` to ``target`` and return its seal.

    Raise Torn or Poisoned, as :meth:`Tier.save` does; ``target`` is incomplete then.
    """
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
        # checked for each chunk: the writer may wait for the end of this copy
        if source.sequence != sequence:
            raise Torn(f"step {step} was changed before its copy was complete")
    if source.sequence != sequence:
        raise Torn(f"step {step} was changed before its copy was complete")
    at("copied")
    target.end()
    return Seal(step, generation, size_bytes, digest.hexdigest())
