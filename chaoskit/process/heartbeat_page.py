"""The progress board: one page of shared memory in which a worker shows what it is doing.

The agent creates it, the worker's main thread writes it, the agent reads it without asking. A second part of the page
holds the life latch: a robust mutex that the worker locks once. The kernel marks it the moment the worker begins to
die, before its memory is freed, its sockets are closed or its parent is told (0.2 ms instead of 90 ms a GB).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from chaoskit.vocabulary import TIMED_PHASES, Phase

_PAGE_BYTES = 4096
_LATCH_OFFSET = 2048
_COPY_PAUSE_S = 0.0005
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_STALLED, _PTHREAD_MUTEX_ROBUST = 0, 1

(
    _PID,
    _TID,
    _PHASE,
    _SINCE,
    _REHEARSAL,
    _GENERATION,
    _RANK,
    _STEP,
    _COMMITS,
    _LOSS,
    _COPYING,
    _COPIED,
    _LEASE,
    _PROTECTED,
    _KEPT,
    _DUE,
    _APART,
    _TRAINED_IN,
    _EFFORT,  # even while the slots behind it belong together
) = range(19)
_SPENT = slice(_EFFORT + 1, _EFFORT + 7)  # in the order of Spent
_LONGEST = slice(_SPENT.stop, _SPENT.stop + len(TIMED_PHASES))
_LONGEST_OF = {int(phase): slot for slot, phase in enumerate(TIMED_PHASES, _LONGEST.start)}
_MOMENT_NS = 1_000_000

_libc = ctypes.CDLL(None, use_errno=True)
_DOUBLE, _INT64 = struct.Struct("d"), struct.Struct("q")


class Spent(NamedTuple):
    """Where the time of a worker's committed steps went: sums over all of them, times in nanoseconds."""

    steps: int
    shards: int
    compute_ns: int
    input_ns: int
    wait_ns: int
    other_ns: int


class Board:
    """Both sides of the page. Integers are written in one store each, so a reader never sees half of one.

    Args:
        fd: of the page.
        bell: an eventfd that the worker rings when its state has changed; -1 where nobody listens.
        now_s, sleep: the clock of :meth:`await_copy`.
    """

    def __init__(
        self,
        fd: int,
        bell: int = -1,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fd, self.bell = fd, bell
        self._now_s, self._sleep = now_s, sleep
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._slots = memoryview(self._map).cast("q")
        self._latch = (ctypes.c_char * 64).from_buffer(self._map, _LATCH_OFFSET)

    @classmethod
    def create(cls, robust: bool = True) -> Board:
        """A fresh board with an unlocked latch (agent), which the kernel breaks if it is ``robust``."""
        fd = os.memfd_create("chaoskit-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        board = cls(fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        board._init_latch(robust)
        for slot in (
            _RANK,
            _COPIED,
            _PROTECTED,
            _KEPT,
        ):  # the state before the first step is copied, too
            board._slots[slot] = -1
        return board

    def _init_latch(self, robust: bool) -> None:
        attributes = (ctypes.c_char * 64)()
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED)
        _libc.pthread_mutexattr_setrobust(
            attributes, _PTHREAD_MUTEX_ROBUST if robust else _PTHREAD_MUTEX_STALLED
        )
        _libc.pthread_mutex_init(self._latch, attributes)

    # -- worker -----------------------------------------------------------------------------------------------

    def sign_on(self) -> None:
        """Lock the latch for the life of the calling thread, which must be the worker's main thread."""
        self._slots[_PID] = os.getpid()
        self._slots[_TID] = threading.get_native_id()
        _libc.pthread_mutex_lock(self._latch)
        self.enter(Phase.START)

    def enter(self, phase: Phase) -> None:
        """Show that the main thread entered ``phase`` now, and how long the one before it took at most."""
        slots, now_ns = self._slots, time.monotonic_ns()
        longest = _LONGEST_OF.get(slots[_PHASE])
        if longest is not None and self._is_warm:
            slots[longest] = max(slots[longest], now_ns - slots[_SINCE])
        slots[_PHASE] = phase
        slots[_SINCE] = now_ns

    @property
    def _is_warm(self) -> bool:
        """Whether a step was committed in this generation: rehearsals and first steps have limits of their own."""
        return 0 < self._slots[_TRAINED_IN] == self._slots[_GENERATION]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Show that the main thread waits for other ranks, in the middle of a phase."""
        interrupted = self._slots[_PHASE]
        self.enter(Phase.REDUCE)
        try:
            yield
        finally:
            self.enter(Phase(interrupted))

    def rehearsed(self, duration_ns: int) -> None:
        """Show how long the rehearsal of a step took, one shard of it."""
        self._slots[_REHEARSAL] = duration_ns

    def place(self, generation: int, rank: int) -> None:
        self._slots[_GENERATION] = generation
        self._slots[_RANK] = rank

    def progress(self, step: int, loss: float | None = None) -> None:
        """Show that ``step`` steps are committed; ``loss`` is given when this rank committed the last one itself."""
        self._slots[_STEP] = step
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        if time.monotonic_ns() - before_ns < _MOMENT_NS:  # else the CPU was lost between the two
            self._slots[_APART] = wall_ns - before_ns
        if loss is not None:
            self._slots[_TRAINED_IN] = self._slots[_GENERATION]
            self._slots[_COMMITS] += 1
            self._slots[_LOSS] = _INT64.unpack(_DOUBLE.pack(loss))[0]

    def spend(self, spent: Sequence[int]) -> None:
        """Show where the time went, in the order of :class:`Spent`."""
        slots = self._slots
        slots[_EFFORT] += 1
        for slot, value in enumerate(spent, _EFFORT + 1):
            slots[slot] = value
        slots[_EFFORT] += 1

    def announce(self) -> None:
        """Tell the keeper of the node, if it makes copies, that a state is complete."""
        if self._slots[_COPYING] and self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def await_copy(self, step: int, limit_s: float, due_limit_s: float) -> None:
        """Before the state of ``step`` steps is overwritten: let the keeper finish its copy.

        Args:
            limit_s: wait no longer.
            due_limit_s: the same for a state that is to be stored. If it was too short once, it is not spent again
                before the keeper has answered: it may stand still.
        """
        if not self._slots[_COPYING] or self._slots[_COPIED] >= step:
            return
        due = 0 < self._slots[_DUE] <= step
        deadline_s = self._now_s() + (due_limit_s if due else limit_s)
        while self._slots[_COPYING] and self._slots[_COPIED] < step:
            if self._now_s() > deadline_s:
                self._slots[_DUE] = 0 if due else self._slots[_DUE]
                return
            self._sleep(_COPY_PAUSE_S)

    @property
    def lease_over(self) -> bool:
        """Whether the node has not been heard by a coordinator for so long that others may train in its place."""
        return 0 < self._slots[_LEASE] < time.monotonic_ns()

    @property
    def protected(self) -> int:
        """The newest step of which this worker's piece of the state has all its copies; -1 for none."""
        return self._slots[_PROTECTED]

    def keep(self, step: int) -> None:
        """Every piece of the state of ``step`` steps has all its copies: these are kept until a newer one has."""
        self._slots[_KEPT] = step

    # -- agent and keeper -------------------------------------------------------------------------------------

    def await_death(self) -> None:
        """Block until the thread that signed on begins to die. To be called in a thread of its own."""
        result = _libc.pthread_mutex_lock(self._latch)
        if result not in (0, errno.EOWNERDEAD):
            raise OSError(result, os.strerror(result))

    def lease(self, until_ns: int) -> None:
        """The worker may commit until then, on CLOCK_MONOTONIC."""
        self._slots[_LEASE] = until_ns

    def copying(self, wanted: bool) -> None:
        """Whether the keeper makes copies of what this worker commits, so that it may be waited for."""
        self._slots[_COPYING] = wanted

    def copied(self, step: int) -> None:
        """The worker need not wait any more with the state of ``step`` steps: it is copied, or given up."""
        self._slots[_COPIED] = step

    def due(self, step: int) -> None:
        """The state of ``step`` steps is to be stored: for a copy of it the worker may wait longer. 0 for none."""
        self._slots[_DUE] = step

    @property
    def spent(self) -> Spent | None:
        """Where the time went; None if that was just being written, or nothing was yet."""
        slots = self._slots
        before = slots[_EFFORT]
        spent = Spent(*slots[_SPENT])
        return spent if before and not before & 1 and slots[_EFFORT] == before else None

    @property
    def kept(self) -> int:
        """The newest step of which every piece has all its copies, as far as this worker knows; -1 for none."""
        return self._slots[_KEPT]

    def protect(self, step: int) -> None:
        """This worker's piece of the state of ``step`` steps has all its copies."""
        self._slots[_PROTECTED] = step

    @property
    def pid(self) -> int:
        return self._slots[_PID]

    @property
    def tid(self) -> int:
        return self._slots[_TID]

    @property
    def phase(self) -> Phase:
        return Phase(self._slots[_PHASE])

    @property
    def since_ns(self) -> int:
        """CLOCK_MONOTONIC at which the phase was entered."""
        return self._slots[_SINCE]

    @property
    def apart_ns(self) -> int:
        """Wall clock less CLOCK_MONOTONIC, as the worker had them at its last step; 0 before the first."""
        return self._slots[_APART]

    @property
    def longest_ms(self) -> tuple[float, ...]:
        """The longest phase of each of :data:`TIMED_PHASES` that ended by itself, after the first step of a generation.

        A phase that another one interrupts counts in pieces, as its age does.
        """
        return tuple(longest_ns / 1e6 for longest_ns in self._slots[_LONGEST])

    @property
    def rehearsal_ms(self) -> float:
        """Duration of the rehearsal; 0 before its end."""
        return self._slots[_REHEARSAL] / 1e6

    @property
    def generation(self) -> int:
        return self._slots[_GENERATION]

    @property
    def rank(self) -> int:
        return self._slots[_RANK]

    @property
    def step(self) -> int:
        return self._slots[_STEP]

    @property
    def commits(self) -> int:
        return self._slots[_COMMITS]

    @property
    def trained_in(self) -> int:
        """The generation in which this worker last committed a step; 0 for none."""
        return self._slots[_TRAINED_IN]

    @property
    def loss(self) -> float:
        return float(_DOUBLE.unpack(_INT64.pack(self._slots[_LOSS]))[0])
