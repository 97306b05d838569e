"""Slots: the reused pieces of shared memory that snapshots are written to, locked while they are written or read.

A slot is an :class:`ArenaImage` whose header bears its seal, so another process that maps it can read and trust it when
its writer is gone. Its writer locks it exclusively, whoever reads it shares a lock: these are locks of open files
(``flock``), which the kernel drops with their process. So a copy on its way to a peer is not overwritten, and a reader
that dies blocks nobody.
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
    """No slot may be overwritten now: what is in them is protected, being read, or not complete yet."""


class Slots:
    """``count`` slots of equal capacity, in unnamed memory, which lasts as long as a process has it open.

    Which one is written next says :mod:`chaoskit.checkpoint.memory.rotation`: never the one with the protected step;
    where none is protected, or no slot holds that step, never the newest complete one. Of the others the oldest. With
    two slots there is one choice at most.
    """

    def __init__(self, count: int = 2) -> None:
        self._count = count
        self._images: list[ArenaImage] = []
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Of each; 0 before all of them have memory."""
        if len(self._images) < self._count:
            return 0
        return min(image.capacity_bytes for image in self._images)

    @property
    def size_bytes(self) -> int:
        """Memory that is taken, in all slots together."""
        return sum(image.capacity_bytes for image in self._images)

    def complete(self) -> list[tuple[str, Seal]]:
        """Paths and seals of the complete copies, the newest first. Looks without a lock."""
        found = [
            (path, Seal(image.step, image.generation, image.size_bytes, image.checksum))
            for path, image in zip(self.paths, self._images, strict=True)
        ]
        return sorted(
            (each for each in found if each[1].checksum),
            key=lambda each: each[1].recency,
            reverse=True,
        )

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of the slots. Others open them as ``/proc/PID/fd/N``; they stay the same when slots grow."""
        return tuple(image.fd for image in self._images)

    @property
    def paths(self) -> tuple[str, ...]:
        """Where processes of this host can open the slots."""
        return tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds)

    def reserve(self, size_bytes: int) -> None:
        """Make room for so much data in each slot, every page of it touched. Takes about a second for each GB.

        Raises:
            OSError: if there is no room. What the slots hold is kept.
        """
        while len(self._images) < self._count:
            self._images.append(ArenaImage(size_bytes))
            self._images[-1].touch()
        for image in self._images:
            if image.capacity_bytes < size_bytes:
                image.grow(size_bytes)
                image.touch()

    def take(self, protected_step: int = -1) -> ArenaImage:
        """A slot to overwrite, locked until it is given back.

        Raises:
            Busy: if there is none.
        """
        with self._lock:
            contents = self._contents()
            for index in write_order(contents, protected_step):
                image = self._images[index]
                if _lock(image.fd):
                    self._taken.add(image.fd)
                    return image
            keep = protected_slot(contents, protected_step)
        reasons = [_why_not(content, kept=index == keep) for index, content in enumerate(contents)]
        raise Busy("no slot is free: " + ", ".join(reasons))

    def _contents(self) -> list[Content]:
        return [
            Content(image.step, image.generation, bool(image.checksum), image.fd in self._taken)
            for image in self._images
        ]

    def give_back(self, image: ArenaImage) -> None:
        """It is complete, or will not be."""
        with self._lock:
            fcntl.flock(image.fd, fcntl.LOCK_UN)
            self._taken.discard(image.fd)

    def forget_after(self, step: int) -> None:
        """Training went back to ``step``: what was committed later never happened."""
        with self._lock:
            for index in undone(self._contents(), step):
                self._images[index].spoil()


def _why_not(content: Content, *, kept: bool) -> str:
    """Why a slot is not overwritten now."""
    if content.taken:
        return "one is not complete yet"
    return f"step {content.step} must be kept" if kept else f"step {content.step} is being read"


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
