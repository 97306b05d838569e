"""A fault that acts on a target written by hand, in an event loop that goes on only while a test lets it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chaoskit.substrate.core.processes import Process
from chaoskit.substrate.undo import UndoLog
from chaoskit.wire import frames
from chaoskit.wire.messages import AtHook, Message
from faults.base import Fault
from faults.evidence import Evidence
from faults.target import Target
from support.waiting import LIMIT_S

_TURNS = 8  # of the event loop: more than anything needs that has been woken
_POLL_S = 0.004


class Deserted:
    """What is left of a cluster when its run is over: a connection that is closed.

    Attributes:
        unsaid: what could not be said.
    """

    def __init__(self) -> None:
        self.unsaid: list[Message] = []

    def send(self, message: Message) -> None:
        self.unsaid.append(message)
        with socket.socket() as closed:
            closed.close()
            frames.send(closed, message)


def target_of(undo: UndoLog, cluster: Any = None, **known: Any) -> Target:
    """Rank 1, struck in its step 8; of a run that is over, unless there is a cluster."""
    where: dict[str, Any] = {
        "worker": "node1.w0",
        "node": "node1",
        "rank": 1,
        "step": 8,
        "phase": "forward",
    }
    process = {
        "process": Process(2**22 + 1, 1, "node1.w0"),
        "tid": 2**22 + 1,
    }  # above the largest pid
    there: Any = cluster or Deserted()
    return Target(cluster=there, undo=undo, **{"fault_id": "fault0"} | where | process | known)


class Injecting:
    """A fault in force.

    Attributes:
        evidence: what it has shown so far.
    """

    def __init__(self, runner: asyncio.Runner, fault: Fault, target: Target) -> None:
        self._runner, self._fault, self._target = runner, fault, target
        self.evidence: list[Evidence] = []
        self._task = runner.get_loop().create_task(self._inject())

    async def _inject(self) -> None:
        self._target.claim()
        self._target.injected_ns = self._target.acted_ns
        async for evidence in self._fault.inject(self._target):
            self.evidence.append(evidence)

    @property
    def is_over(self) -> bool:
        """Whether the fault waits for nothing more."""
        return self._task.done()

    def go_on(self) -> None:
        """Have the fault look once more, and do what follows from that. Raises what the fault raises."""
        self._target.wake()
        self._runner.run(_turns())
        if self._task.done():
            self._task.result()

    def hear(self, *messages: Any) -> None:
        """Deliver messages of the run, one after the other."""
        for message in messages:
            if isinstance(message, AtHook):
                assert self._target.offer_hook(message)
            else:
                self._target.deliver(message)
            self.go_on()

    def comes(self, condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> bool:
        """Let time pass, in which the fault looks when it wants to, until ``condition`` is true. Whether it came."""
        return self._runner.run(_until(condition, time.monotonic() + limit_s))

    def is_seen(self, *, limit_s: float = LIMIT_S) -> bool:
        """Let time pass until there is evidence. Whether there is."""
        return self.comes(lambda: self.evidence, limit_s=limit_s)

    def end(self) -> None:
        """End the fault where it waits: it puts back what must be. Raises what the fault raises."""
        self._task.cancel()
        self._runner.run(_ended(self._task))


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _until(condition: Callable[[], object], deadline_s: float) -> bool:
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def _ended(task: asyncio.Task[None]) -> None:
    (error,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(error, Exception):  # an end by cancellation is none
        raise error


@contextmanager
def injecting(fault: Fault, target: Target) -> Iterator[Injecting]:
    """Have ``fault`` act on ``target`` now; it is ended with the ``with``."""
    with asyncio.Runner() as runner:
        one = Injecting(runner, fault, target)
        one.go_on()
        yield one
        one.end()
