"""The engine of the simulation: a fake clock, and processes and threads that run by it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from random import Random
from typing import Any

#: A history with more events than this is an endless loop.
EVENTS_MAX = 200_000
#: A wait of a strand: for some seconds, or until a condition holds.
Wish = float | Callable[[], bool]
Work = Generator[Wish, None, Any]


class Endless(Exception):
    """A history has more than ``EVENTS_MAX`` events: it is an endless loop."""


class Engine:
    """The queue of future events in the order of their time, and the only source of randomness."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.random = Random(seed)
        self.uniform = self.random.uniform
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.trace: list[str] | None = None

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``act`` in ``delay_s`` seconds. Events of equal times keep their order."""
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, act, arguments))

    def note(self, text: str) -> None:
        """Add a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now_s:9.4f}  {text}")

    def run(self, over: Callable[[], bool], until_s: float) -> bool:
        """Run events until ``over`` returns True. Return False if it does not by ``until_s``.

        Raises:
            Endless: after ``EVENTS_MAX`` events.
        """
        queue, pop = self._queue, heapq.heappop
        while queue and not over():
            self.now_s, _, act, arguments = pop(queue)
            if self.now_s > until_s:
                return False
            if self._count > EVENTS_MAX:
                raise Endless(
                    f"{EVENTS_MAX} events by {self.now_s:g} s: the history goes in circles"
                )
            act(*arguments)
        return over()


class Process:
    """A process that can be killed and frozen. While it is frozen, its events wait in their order.

    Attributes:
        alive: it has not ended.
        frozen: it is stopped by SIGSTOP.
        paused: its machine stands still, with the kernel.
        ends: functions that are called when it ends, as the kernel does.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.alive, self.frozen, self.paused = True, False, False
        self.ends: list[Callable[[], None]] = []
        self._parked: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._waiting: list[tuple[Strand, Callable[[], bool]]] = []

    def run(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call ``act`` in this process: at once, after it is thawed, or never if it has ended."""
        if not self.alive:
            return
        if self.frozen:
            self._parked.append((act, arguments))
        else:
            act(*arguments)

    def after(self, delay_s: float, act: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``act`` in this process, in ``delay_s`` seconds at the earliest."""
        self.engine.after(delay_s, self.run, act, *arguments)

    def freeze(self) -> None:
        """Stop the process, as by SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """Continue the process, as by SIGCONT, and run the events that have waited."""
        self.frozen = False
        while self._parked and self.alive and not self.frozen:
            act, arguments = self._parked.pop(0)
            act(*arguments)

    def kill(self) -> None:
        """End the process, as by SIGKILL."""
        if self.alive:
            self.engine.note(f"{self.name} ends")
            self.alive = False
            ends, self.ends = self.ends, []
            for end in ends:
                end()

    def begin(self, work: Work) -> Strand:
        """Run ``work`` in a thread of this process."""
        strand = Strand(self, work)
        strand.proceed()
        return strand

    def notify(self) -> None:
        """Wake the threads whose condition holds now, like a condition's ``notify_all``."""
        for strand, condition in tuple(self._waiting):
            if condition():
                strand.wake()


class Strand:
    """A thread: a generator that yields its waits."""

    __slots__ = ("_condition", "_process", "_turn", "_work", "hung")

    def __init__(self, process: Process, work: Work) -> None:
        self._process, self._work = process, work
        self._condition: Callable[[], bool] | None = None
        self._turn = 0
        self.hung = False

    def wake(self) -> None:
        """Check the condition again, once the scheduler runs this thread."""
        self._process.after(1e-5, self._check, self._turn)

    def _check(self, turn: int) -> None:
        condition = self._condition
        if turn == self._turn and condition is not None and condition():
            self.proceed()

    def _timer(self, turn: int) -> None:
        if turn == self._turn:
            self.proceed()

    def proceed(self) -> None:
        """Run to the next wait."""
        if self.hung:
            return
        process = self._process
        if self._condition is not None:
            process._waiting.remove((self, self._condition))
            self._condition = None
        self._turn += 1
        for wish in self._work:
            if not callable(wish):
                process.after(wish, self._timer, self._turn)
                return
            if not wish():
                self._condition = wish
                process._waiting.append((self, wish))
                return
            if not process.alive:
                return


def until(
    process: Process, condition: Callable[[], bool], timeout_s: float | None
) -> Generator[Wish, None, bool]:
    """Wait for ``condition``. Return False after ``timeout_s``; None stands for no timeout."""
    if timeout_s is None:
        yield condition
        return True
    deadline_s = process.engine.now_s + timeout_s
    process.after(timeout_s + 1e-9, process.notify)
    yield lambda: condition() or process.engine.now_s >= deadline_s
    return condition()
