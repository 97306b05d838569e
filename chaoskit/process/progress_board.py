"""The progress board: a page of shared memory in which a worker shows its progress.

The agent creates the page and reads it without asking; the worker's main thread writes it. A second
part of the page holds the life latch, a robust mutex that the worker locks once. The kernel marks
it when the worker begins to die: 0.2 ms later instead of 90 ms per GB. At that time the worker's
memory is not yet freed, its sockets are open, and its parent is not yet notified.

-> agent/worker_handle.py makes the reports of the board; coordinator/detectors/ judges them.
daemon/: the copies for which a worker waits. agent/agent.py notices the broken latch.
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
    _EFFORT,  # even while the slots after it are consistent
) = range(19)
_SPENT = slice(_EFFORT + 1, _EFFORT + 7)  # in the order of Spent
_LONGEST = slice(_SPENT.stop, _SPENT.stop + len(TIMED_PHASES))
_LONGEST_OF = {int(phase): slot for slot, phase in enumerate(TIMED_PHASES, _LONGEST.start)}
_MOMENT_NS = 1_000_000

_libc = ctypes.CDLL(None, use_errno=True)
_DOUBLE, _INT64 = struct.Struct("d"), struct.Struct("q")


class Spent(NamedTuple):
    """Distribution of the time of a worker's committed steps.

    Each field is a sum over all steps; times are in nanoseconds.
    """

    steps: int
    shards: int
    compute_ns: int
    input_ns: int
    wait_ns: int
    other_ns: int


class Board:
    """The progress board of a worker, with the methods of both sides.

    Each integer is written in one store, so that a reader never sees half of it.

    Args:
        fd: descriptor of the page.
        bell: an eventfd that the worker signals when its state has changed; -1 if there is no
            reader.
        now_s: clock of :meth:`await_copy`.
        sleep: sleep function of :meth:`await_copy`.
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
        """Return a new board with an unlocked latch, for the agent, which closes its descriptors.

        Args:
            robust: True if the kernel must break the latch when the worker dies.
        """
        fd = os.memfd_create("chaoskit-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        board = cls(fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        board._init_latch(robust)
        # 0 is a step: the state before the first one is copied, too
        for slot in (_RANK, _COPIED, _PROTECTED, _KEPT):
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

    # -- worker ------------------------------------------------------------------------------------

    def sign_on(self) -> None:
        """Record the calling thread as the worker's main thread, and lock the life latch."""
        self._slots[_PID] = os.getpid()
        self._slots[_TID] = threading.get_native_id()
        _libc.pthread_mutex_lock(self._latch)
        self.enter(Phase.START)

    def enter(self, phase: Phase) -> None:
        """Record that the main thread enters ``phase`` now.

        The longest duration of the last phase is updated, once a step was committed in this
        generation.
        """
        slots, now_ns = self._slots, time.monotonic_ns()
        longest = _LONGEST_OF.get(slots[_PHASE])
        if longest is not None and self._is_warm:
            slots[longest] = max(slots[longest], now_ns - slots[_SINCE])
        slots[_PHASE] = phase
        slots[_SINCE] = now_ns

    @property
    def _is_warm(self) -> bool:
        """True if a step was committed in this generation.

        Rehearsals and first steps have limits of their own.
        """
        return 0 < self._slots[_TRAINED_IN] == self._slots[_GENERATION]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that the main thread waits for other ranks, in the middle of a phase.

        The phase is entered again at the end of the ``with``, so its age begins anew.
        """
        interrupted = self._slots[_PHASE]
        self.enter(Phase.REDUCE)
        try:
            yield
        finally:
            self.enter(Phase(interrupted))

    def rehearsed(self, duration_ns: int) -> None:
        """Record how long the rehearsal of a step with one shard took, in nanoseconds."""
        self._slots[_REHEARSAL] = duration_ns

    def place(self, generation: int, rank: int) -> None:
        """Record the generation and the rank of the worker."""
        self._slots[_GENERATION] = generation
        self._slots[_RANK] = rank

    def progress(self, step: int, loss: float | None = None) -> None:
        """Record that ``step`` steps are committed.

        Args:
            loss: loss of the last step, if this rank has committed it itself; else None.
        """
        self._slots[_STEP] = step
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        if time.monotonic_ns() - before_ns < _MOMENT_NS:  # else the thread was interrupted
            self._slots[_APART] = wall_ns - before_ns
        if loss is not None:
            self._slots[_TRAINED_IN] = self._slots[_GENERATION]
            self._slots[_COMMITS] += 1
            self._slots[_LOSS] = _INT64.unpack(_DOUBLE.pack(loss))[0]

    def spend(self, spent: Sequence[int]) -> None:
        """Record the distribution of the time, in the order of :class:`Spent`."""
        slots = self._slots
        slots[_EFFORT] += 1
        for slot, amount in enumerate(spent, _EFFORT + 1):
            slots[slot] = amount
        slots[_EFFORT] += 1

    def announce(self) -> None:
        """Signal the node's daemon that a state is complete, if the daemon makes copies."""
        if self._slots[_COPYING] and self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def await_copy(self, step: int, limit_s: float, due_limit_s: float) -> None:
        """Wait for the daemon's copy of the state of ``step`` steps before it is overwritten.

        Return also without the copy, once the time is over or the daemon makes no copies.

        Args:
            limit_s: longest wait in seconds.
            due_limit_s: longest wait in seconds for a state that is to be stored. If it was too
                short once, it does not apply again until the daemon has answered, as the daemon may
                be stopped.
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
        """True if the node's lease is over, so that others may train in its place.

        False before the first lease.
        """
        return 0 < self._slots[_LEASE] < time.monotonic_ns()

    @property
    def protected(self) -> int:
        """The newest step for which this worker's piece has all its copies; -1 for none."""
        return self._slots[_PROTECTED]

    def keep(self, step: int) -> None:
        """Record that every piece of the state of ``step`` steps has all its copies.

        The copies are kept until every piece of a newer state has its copies.
        """
        self._slots[_KEPT] = step

    # -- agent and keeper --------------------------------------------------------------------------

    def await_death(self) -> None:
        """Block until the thread that signed on begins to die. Called in a thread of its own.

        The worker must have signed on before; without that, it returns at once.

        Raises:
            OSError: if the latch cannot be locked.
        """
        result = _libc.pthread_mutex_lock(self._latch)
        if result not in (0, errno.EOWNERDEAD):
            raise OSError(result, os.strerror(result))

    def lease(self, until_ns: int) -> None:
        """Allow the worker to commit until ``until_ns``, on CLOCK_MONOTONIC."""
        self._slots[_LEASE] = until_ns

    def copying(self, is_copied: bool) -> None:
        """Set whether the daemon copies the states of this worker.

        The worker waits for copies only if it does.
        """
        self._slots[_COPYING] = is_copied

    def copied(self, step: int) -> None:
        """Record that the worker need not wait with the state of ``step`` steps.

        It is copied, or given up.
        """
        self._slots[_COPIED] = step

    def due(self, step: int) -> None:
        """Mark the state of ``step`` steps as to be stored; 0 for none.

        The worker may wait longer for the copy of such a state.
        """
        self._slots[_DUE] = step

    @property
    def spent(self) -> Spent | None:
        """The distribution of the time; None while it is being written, and at first."""
        slots = self._slots
        before = slots[_EFFORT]
        spent = Spent(*slots[_SPENT])
        return spent if before and not before & 1 and slots[_EFFORT] == before else None

    @property
    def kept(self) -> int:
        """The newest step of which every piece is known to have all its copies; -1 for none."""
        return self._slots[_KEPT]

    def protect(self, step: int) -> None:
        """Record that this worker's piece of the state of ``step`` steps has all its copies."""
        self._slots[_PROTECTED] = step

    @property
    def pid(self) -> int:
        """The pid of the worker; 0 before it has signed on."""
        return self._slots[_PID]

    @property
    def tid(self) -> int:
        """The thread id of the worker's main thread; 0 before it has signed on."""
        return self._slots[_TID]

    @property
    def phase(self) -> Phase:
        """The phase that the main thread is in; ``START`` before it has signed on."""
        return Phase(self._slots[_PHASE])

    @property
    def since_ns(self) -> int:
        """The CLOCK_MONOTONIC in nanoseconds at which the phase was entered; 0 before the first."""
        return self._slots[_SINCE]

    @property
    def apart_ns(self) -> int:
        """The wall clock minus CLOCK_MONOTONIC in nanoseconds, at the last step; 0 before it."""
        return self._slots[_APART]

    @property
    def longest_ms(self) -> tuple[float, ...]:
        """The longest duration in ms of each of :data:`TIMED_PHASES`.

        The first step of a generation does not count. A phase counts once it has ended by itself. A
        phase that another one interrupts counts in pieces, as its age does.
        """
        return tuple(longest_ns / 1e6 for longest_ns in self._slots[_LONGEST])

    @property
    def rehearsal_ms(self) -> float:
        """The duration of the rehearsal in ms; 0 before its end."""
        return self._slots[_REHEARSAL] / 1e6

    @property
    def generation(self) -> int:
        """The generation that the worker trains in; 0 before its first."""
        return self._slots[_GENERATION]

    @property
    def rank(self) -> int:
        """The rank of the worker; -1 for none."""
        return self._slots[_RANK]

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._slots[_STEP]

    @property
    def commits(self) -> int:
        """The number of steps that this worker has committed itself."""
        return self._slots[_COMMITS]

    @property
    def trained_in(self) -> int:
        """The generation in which this worker last committed a step; 0 for none."""
        return self._slots[_TRAINED_IN]

    @property
    def loss(self) -> float:
        """The loss of the last step that this worker has committed; 0 before it."""
        return float(_DOUBLE.unpack(_INT64.pack(self._slots[_LOSS]))[0])
