"""What may be wrong with a disk, and what that means for each thing that is asked of it. Pure."""

from __future__ import annotations

import errno
import math
import threading
from random import Random
from typing import Literal, NamedTuple, get_args

import msgspec

#: What is asked of a disk. ``change``: make, remove, rename or truncate something; ``sync``: make it durable.
Operation = Literal["read", "write", "change", "sync"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_MODIFYING = frozenset({"write", "change"})


class Full(msgspec.Struct, frozen=True, tag=True):
    """So many bytes more can be written, and then no more."""

    room_bytes: int = 0


class ReadOnly(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be changed, as after an error of the file system."""


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Every operation takes ``delay_ms`` longer, and so much more as its bytes take at ``bytes_per_s`` (0: nothing)."""

    delay_ms: float = 0.0
    bytes_per_s: float = 0.0


class Failing(msgspec.Struct, frozen=True, tag=True):
    """A share of these operations fails with an input/output error."""

    operations: tuple[Operation, ...] = OPERATIONS
    share: float = 1.0


Trouble = Full | ReadOnly | Slow | Failing


class Ruling(NamedTuple):
    """What becomes of an operation: it waits for ``delay_ms``, and then fails with ``errno``, or not (0)."""

    errno: int = 0
    delay_ms: float = 0.0


class Ailments:
    """Everything that is wrong with one disk. Any thread may ask."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = Random(seed)
        self._lock = threading.Lock()
        self._troubles: dict[int, Trouble] = {}
        self._met: dict[int, int] = {}
        self._written_bytes: dict[int, int] = {}  # since a disk became full
        self._number = 0

    def impose(self, trouble: Trouble) -> int:
        """From now on. Gives the number of the trouble."""
        with self._lock:
            self._number += 1
            self._troubles[self._number] = trouble
            self._met[self._number] = self._written_bytes[self._number] = 0
            return self._number

    def lift(self, number: int) -> int:
        """Not any more. Gives how many operations have met it."""
        with self._lock:
            self._troubles.pop(number, None)
            return self._met[number]

    def met(self, number: int) -> int:
        """How many operations were refused or held up by it so far."""
        with self._lock:
            return self._met[number]

    @property
    def room_bytes(self) -> float:
        """How many bytes can still be written; math.inf where the disk is not full."""
        with self._lock:
            full = [
                (number, one) for number, one in self._troubles.items() if isinstance(one, Full)
            ]
            return min(
                (one.room_bytes - self._written_bytes[number] for number, one in full),
                default=math.inf,
            )

    def rule(self, operation: Operation, size_bytes: int = 0) -> Ruling:
        """What becomes of an operation on so many bytes. The first error counts, all delays add up."""
        with self._lock:
            number, delay_ms = 0, 0.0
            for name, trouble in self._troubles.items():
                failed, more_ms = self._apply(name, trouble, operation, size_bytes)
                number, delay_ms = number or failed, delay_ms + more_ms
                self._met[name] += bool(failed or more_ms)
            return Ruling(number, delay_ms)

    def _apply(
        self, name: int, trouble: Trouble, operation: Operation, size_bytes: int
    ) -> tuple[int, float]:
        match trouble:
            case ReadOnly() if operation in _MODIFYING:
                return errno.EROFS, 0.0
            case Full(room_bytes) if operation == "write":
                if self._written_bytes[name] + size_bytes > room_bytes:
                    return errno.ENOSPC, 0.0
                self._written_bytes[name] += size_bytes
            case Failing(operations, share) if (
                operation in operations and self._chance.random() < share
            ):
                return errno.EIO, 0.0
            case Slow(delay_ms, bytes_per_s):
                return 0, delay_ms + (size_bytes / bytes_per_s * 1e3 if bytes_per_s else 0.0)
        return 0, 0.0
