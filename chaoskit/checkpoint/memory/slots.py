"""Slots: reused pieces of shared memory for snapshots, locked while they are written or read.

A slot is an :class:`ArenaImage` whose header holds the seal of its copy. Another process that maps
the slot can therefore verify and read it after the writer is gone. A writer locks a slot
exclusively; readers share a lock. These are locks of open files (``flock``), which the kernel drops
when their process ends. A copy on its way to a peer is never overwritten, and a reader that dies
blocks no writer.

-> ``memory/rotation.py``: which slot is written next. ``memory/stored.py``: reads of a slot.
-> ``memory/snapshotter.py`` writes a worker's own slots; ``peer/server.py`` those of other nodes.
"""

from __future__ import annotations

import fcntl
import os
import threading

from chaoskit.checkpoint.layout.arena import ArenaImage
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.checkpoint.memory.rotation import Content, protected_slot, undone, write_order
from chaoskit.errors import ChaoskitError


class Busy(ChaoskitError):
    """No slot may be overwritten now: each is protected, being read, or being written."""


class Slots:
    """``count`` slots of equal capacity, in unnamed memory that lives while a process has it open.

    :mod:`chaoskit.checkpoint.memory.rotation` chooses the slot that is written next. The slot with
    the protected step is never chosen. If no slot holds that step, the newest complete slot is
    kept. Of the others, an incomplete slot is chosen, or else the oldest.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int = 2) -> None:
        self._count = count
        self._images: list[ArenaImage] = []
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """The capacity of each slot in bytes, or 0 until all slots are allocated."""
        if len(self._images) < self._count:
            return 0
        return min(image.capacity_bytes for image in self._images)

    @property
    def size_bytes(self) -> int:
        """The memory that all slots take together, in bytes."""
        return sum(image.capacity_bytes for image in self._images)

    def complete(self) -> list[tuple[str, Seal]]:
        """Return paths and seals of the complete copies, the newest first. Takes no lock."""
        copies = [
            (path, Seal(image.step, image.generation, image.size_bytes, image.checksum))
            for path, image in zip(self.paths, self._images, strict=True)
        ]
        return sorted(
            (copy for copy in copies if copy[1].checksum),
            key=lambda copy: copy[1].recency,
            reverse=True,
        )

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors of the slots. Other processes open them as ``/proc/PID/fd/N``.

        Descriptors stay the same when slots grow.
        """
        return tuple(image.fd for image in self._images)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths at which processes of this host can open the slots."""
        return tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds)

    def reserve(self, size_bytes: int) -> None:
        """Make room for ``size_bytes`` of data in each slot, and touch every page.

        Call this before the first :meth:`take`. Slots never shrink. Takes about 1 s per GB.

        Raises:
            OSError: if there is no room. The contents of the slots are kept.
        """
        while len(self._images) < self._count:
            self._images.append(ArenaImage(size_bytes))
            self._images[-1].touch()
        for image in self._images:
            if image.capacity_bytes < size_bytes:
                image.grow(size_bytes)
                image.touch()

    def take(self, protected_step: int = -1) -> ArenaImage:
        """Lock a slot for writing and return it; :meth:`give_back` unlocks it.

        Args:
            protected_step: step whose copy must be kept; -1 for none.

        Raises:
            Busy: if no slot may be overwritten now, or none is reserved.
        """
        with self._lock:
            contents = self._contents()
            for index in write_order(contents, protected_step):
                image = self._images[index]
                if _lock(image.fd):
                    self._taken.add(image.fd)
                    return image
            protected_index = protected_slot(contents, protected_step)
        reasons = [
            _reason_kept(content, kept=index == protected_index)
            for index, content in enumerate(contents)
        ]
        raise Busy("no slot is free: " + ", ".join(reasons))

    def _contents(self) -> list[Content]:
        """Return the content of each slot, in the order of the slots."""
        return [
            Content(image.step, image.generation, bool(image.checksum), image.fd in self._taken)
            for image in self._images
        ]

    def give_back(self, image: ArenaImage) -> None:
        """Unlock a slot, whether or not its copy was completed."""
        with self._lock:
            fcntl.flock(image.fd, fcntl.LOCK_UN)
            self._taken.discard(image.fd)

    def forget_after(self, step: int) -> None:
        """Discard the copies of steps after ``step``, because training went back to it.

        A slot that is being written is left alone.
        """
        with self._lock:
            for index in undone(self._contents(), step):
                self._images[index].invalidate()


def _reason_kept(content: Content, *, kept: bool) -> str:
    """Return the reason why a slot is not overwritten now."""
    if content.taken:
        return "a copy is being written"
    return f"step {content.step} must be kept" if kept else f"step {content.step} is being read"


def _lock(fd: int) -> bool:
    """Lock a file exclusively. Return False at once if another holder has a lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
