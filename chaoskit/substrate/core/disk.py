"""Troubles of a disk, and their effect on each file operation. Pure.

-> ``disk/process.py`` fails or delays the operations of a node. ``disk/disks.py``: the mount over a
directory of a node. ``faults/storage/disk.py``: the faults. ``daemon/saving.py``: what a job does
when its disk is full.
"""

from __future__ import annotations

import errno
import math
import threading
from random import Random
from typing import Literal, NamedTuple, get_args

import msgspec

#: Kinds of disk operations. ``change``: create, remove, rename or truncate; ``sync``: make durable.
Operation = Literal["read", "write", "change", "sync"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_MODIFYING = frozenset({"write", "change"})


class Full(msgspec.Struct, frozen=True, tag=True):
    """Disk with ``room_bytes`` left: writes beyond them fail with ENOSPC."""

    room_bytes: int = 0


class ReadOnly(msgspec.Struct, frozen=True, tag=True):
    """Disk that refuses all changes, as after an error of the file system."""


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Disk that delays every operation of :data:`OPERATIONS`.

    Attributes:
        delay_ms: fixed delay.
        bytes_per_s: throughput, which adds to the delay by the operation's size; 0 for no limit.
    """

    delay_ms: float = 0.0
    bytes_per_s: float = 0.0


class Failing(msgspec.Struct, frozen=True, tag=True):
    """Disk that fails some of the given operations with an input/output error.

    Attributes:
        operations: kinds of operations that may fail.
        share: probability that such an operation fails, from 0 to 1.
    """

    operations: tuple[Operation, ...] = OPERATIONS
    share: float = 1.0


Trouble = Full | ReadOnly | Slow | Failing


class OperationRuling(NamedTuple):
    """Outcome of an operation.

    Attributes:
        errno: error with which it fails; 0 if it succeeds.
        delay_ms: time that it waits before.
    """

    errno: int = 0
    delay_ms: float = 0.0


class DiskTroubles:
    """The troubles of one disk, and the counts of their effects. Thread-safe.

    Args:
        seed: seed of the draws for :class:`Failing`.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._troubles: dict[int, Trouble] = {}
        self._affected: dict[int, int] = {}
        self._written_bytes: dict[int, int] = {}  # since a disk became full
        self._last_id = 0

    def impose(self, trouble: Trouble) -> int:
        """Start a trouble and return its identifier."""
        with self._lock:
            self._last_id += 1
            self._troubles[self._last_id] = trouble
            self._affected[self._last_id] = self._written_bytes[self._last_id] = 0
            return self._last_id

    def lift(self, trouble_id: int) -> int:
        """End a trouble and return the number of operations that it affected.

        A second call returns the same number.
        """
        with self._lock:
            self._troubles.pop(trouble_id, None)
            return self._affected[trouble_id]

    def affected_count(self, trouble_id: int) -> int:
        """Return the number of operations that a trouble has refused or delayed so far."""
        with self._lock:
            return self._affected[trouble_id]

    @property
    def room_bytes(self) -> float:
        """The least room that a :class:`Full` leaves, in bytes; math.inf without such a trouble."""
        with self._lock:
            full_disks = [
                (trouble_id, trouble)
                for trouble_id, trouble in self._troubles.items()
                if isinstance(trouble, Full)
            ]
            return min(
                (
                    trouble.room_bytes - self._written_bytes[trouble_id]
                    for trouble_id, trouble in full_disks
                ),
                default=math.inf,
            )

    def rule(self, operation: Operation, size_bytes: int = 0) -> OperationRuling:
        """Return the outcome of an operation on ``size_bytes``, and count it for its troubles.

        The outcome has the error of the oldest trouble that refuses it, and the sum of all delays.
        """
        with self._lock:
            error, delay_ms = 0, 0.0
            for trouble_id, trouble in self._troubles.items():
                next_error, more_ms = self._apply(trouble_id, trouble, operation, size_bytes)
                error, delay_ms = error or next_error, delay_ms + more_ms
                self._affected[trouble_id] += bool(next_error or more_ms)
            return OperationRuling(error, delay_ms)

    def _apply(
        self, trouble_id: int, trouble: Trouble, operation: Operation, size_bytes: int
    ) -> tuple[int, float]:
        """Return the errno and the delay in ms that a trouble causes; 0 for each that it does not.

        A write that fits uses up room of a :class:`Full` disk, even if another trouble refuses it.
        """
        match trouble:
            case ReadOnly() if operation in _MODIFYING:
                return errno.EROFS, 0.0
            case Full(room_bytes) if operation == "write":
                if self._written_bytes[trouble_id] + size_bytes > room_bytes:
                    return errno.ENOSPC, 0.0
                self._written_bytes[trouble_id] += size_bytes
            case Failing(operations, probability) if (
                operation in operations and self._random.random() < probability
            ):
                return errno.EIO, 0.0
            case Slow(delay_ms, bytes_per_s):
                return 0, delay_ms + (size_bytes / bytes_per_s * 1e3 if bytes_per_s else 0.0)
        return 0, 0.0
