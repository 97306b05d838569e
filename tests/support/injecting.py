"""A fault that acts on a hand-written target, in an event loop that advances only when a test lets
it.
"""

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

_TURNS = 8  # turns of the event loop: more than any woken task needs
_POLL_S = 0.004


class EndedCluster:
    """The remains of a cluster when its run is over: a closed connection.

    Attributes:
        unsent: the messages that could not be sent.
    """

    def __init__(self) -> None:
        self.unsent: list[Message] = []

    def send(self, message: Message) -> None:
        self.unsent.append(message)
        with socket.socket() as closed:
            closed.close()
            frames.send(closed, message)


def target_of(undo: UndoLog, cluster: Any = None, **fields: Any) -> Target:
    """Return rank 1, struck in its step 8. Without ``cluster``, its run is over."""
    place: dict[str, Any] = {
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
    its_cluster: Any = cluster or EndedCluster()
    return Target(
        cluster=its_cluster, undo=undo, **{"fault_id": "fault0"} | place | process | fields
    )


class Injecting:
    """A fault in force.

    Attributes:
        evidence: the evidence that it has yielded so far.
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
        """True if the fault has ended."""
        return self._task.done()

    def poll(self) -> None:
        """Let the fault poll once more and act on the result. Raise what the fault raises."""
        self._target.wake()
        self._runner.run(_turns())
        if self._task.done():
            self._task.result()

    def deliver(self, *messages: Any) -> None:
        """Deliver messages of the run, one after the other."""
        for message in messages:
            if isinstance(message, AtHook):
                assert self._target.offer_hook(message)
            else:
                self._target.deliver(message)
            self.poll()

    def wait_for(self, condition: Callable[[], object], *, limit_s: float = LIMIT_S) -> bool:
        """Let time pass, in which the fault polls as it likes, until ``condition`` is true.

        Return whether it became true.
        """
        return self._runner.run(_until(condition, time.monotonic() + limit_s))

    def is_seen(self, *, limit_s: float = LIMIT_S) -> bool:
        """Let time pass until there is evidence. Return whether there is any."""
        return self.wait_for(lambda: self.evidence, limit_s=limit_s)

    def end(self) -> None:
        """End the fault where it waits; it undoes its changes. Raise what the fault raises."""
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
    if isinstance(error, Exception):  # a cancellation is no error
        raise error


@contextmanager
def injecting(fault: Fault, target: Target) -> Iterator[Injecting]:
    """Have ``fault`` act on ``target`` now; the end of the ``with`` block ends it."""
    with asyncio.Runner() as runner:
        injection = Injecting(runner, fault, target)
        injection.poll()
        yield injection
        injection.end()
