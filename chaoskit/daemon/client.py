"""Client of a node's keeper process: the agent sends orders without waiting.

-> ``daemon/process.py``: the process. ``daemon/keeper_base.py``: how it carries an order out.
-> ``agent/agent.py``: when the orders are sent, and what follows if the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from chaoskit.daemon.protocol import Adopt, Ended, Finish, Finished, WentOn, decode_answer
from chaoskit.errors import ChaoskitError
from chaoskit.process.progress_board import Board
from chaoskit.wire import frames
from chaoskit.wire.messages import Endpoint, Holding, MeasureLinks, Message, Plan, Recall, StoreStep

_RECEIVE_BYTES = 65536
_SLACK_S = 0.25  # for the round trip


@dataclass(slots=True)
class _UnsentOrder:
    """The rest of an order, and the descriptors to send with its first byte.

    They are closed afterwards.
    """

    data: memoryview
    descriptors: Sequence[int]


class KeeperLine:
    """A connection to the keeper process. Orders are sent in the order of their calls.

    Their calls return at once, except :meth:`finish`.

    Args:
        connection: socket to the process.
        port: port at which it accepts copies of pieces; 0 if it accepts none.
    """

    def __init__(self, connection: socket.socket, port: int) -> None:
        self._connection, self._port = connection, port
        self._splitter = frames.FrameSplitter(decode_answer)
        self._unsent: deque[_UnsentOrder] = deque()
        self._finished = asyncio.Event()
        self._reported_step = 0  # the last step of went_on()

    def open(
        self, forward: Callable[[Message], None], fail: Callable[[BaseException], None]
    ) -> None:
        """Start to receive answers in the running event loop.

        Args:
            forward: called with each answer to the coordinator.
            fail: called with an error when the process has ended.
        """
        self._forward, self._fail = forward, fail
        self._connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._receive)

    def close(self) -> None:
        """Close the connection, which ends the process. Orders that are not sent yet are lost."""
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()

    # -- orders, as in NodeKeeper ------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> Endpoint:
        """Order the process to keep the state of a worker that is ready.

        Return the endpoint for other nodes. In a sharded job it has the port of the process, at
        which copies are stored; otherwise it is unchanged.
        """
        adopted, descriptors = endpoint, [board.fd, board.bell]
        with contextlib.ExitStack() as opened:
            try:
                if endpoint.arena_fd >= 0:
                    descriptors += _open(opened, endpoint.pid, [endpoint.arena_fd])
            except OSError:  # the worker has ended already
                adopted = msgspec.structs.replace(endpoint, arena_fd=-1)
            self._enqueue(Adopt(worker, adopted), descriptors)
        return msgspec.structs.replace(endpoint, port=self._port) if self._port else endpoint

    def hold(self, holding: Holding) -> None:
        """Order the process to open the slots into which a worker copies its piece.

        Does nothing if the worker has ended already.
        """
        # without effect if the worker has ended already
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            self._enqueue(holding, _open(opened, holding.pid, holding.fds))

    def follow(self, plan: Plan) -> None:
        """Send the process a new plan, which begins a generation."""
        self._enqueue(plan)

    def ended(self, worker: str) -> None:
        """Report the end of a worker's process, whose state is then kept."""
        self._enqueue(Ended(worker))

    def recall(self, number: int) -> None:
        """Request the list of all copies. The answer ``Sealed`` is forwarded to the coordinator.

        Args:
            number: number of the coordinator's question, which the answer repeats.
        """
        self._enqueue(Recall(number))

    def went_on(self, step: int) -> None:
        """Report that a live worker of this node has committed ``step`` steps.

        Nothing is sent if the step is the one reported last.
        """
        if step != self._reported_step:
            self._reported_step = step
            self._enqueue(WentOn(step))

    def store(self, order: StoreStep) -> None:
        """Order the process to store the state after the step of the order, too."""
        self._enqueue(order)

    def measure(self, order: MeasureLinks) -> None:
        """Order tests of links. The answer ``LinksMeasured`` is forwarded to the coordinator."""
        self._enqueue(order)

    async def finish(self, timeout_s: float, *, last: bool, workers: tuple[str, ...]) -> None:
        """Wait for saves and uploads under way at the end of the job.

        If the process does not answer in twice that time, return all the same.

        Args:
            timeout_s: time limit in the process for saves and uploads together.
            last: wait without a limit instead, and store the state with which the job ended. The
                process itself gives up after 5 minutes without progress.
            workers: workers of this node at the end of the job.
        """
        self._enqueue(Finish(timeout_s, last, workers))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._finished.wait(), None if last else 2 * timeout_s + _SLACK_S
            )

    # -- the connection ----------------------------------------------------------------------------

    def _enqueue(self, order: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue an order, and send it as soon as there is room in the socket.

        The caller keeps its descriptors, which are duplicated.
        """
        # the caller may close its own before there is room
        duplicates = [os.dup(fd) for fd in descriptors]
        self._unsent.append(_UnsentOrder(memoryview(frames.encode(order)), duplicates))
        if len(self._unsent) == 1:
            self._send()

    def _send(self) -> None:
        """Send as much as there is room for, and the rest when there is room again."""
        while self._unsent:
            order = self._unsent[0]
            try:
                sent = socket.send_fds(self._connection, [order.data], list(order.descriptors))
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._send)
                return
            except ConnectionError:  # the process has ended, which _receive() reports
                sent = len(order.data)
            _close(order.descriptors)
            order.data, order.descriptors = order.data[sent:], ()
            if not order.data:
                self._unsent.popleft()
        self._loop.remove_writer(self._connection)

    def _receive(self) -> None:
        """Forward the answers that have arrived. Call ``fail`` if the process has ended.

        The answer to :meth:`finish` is not forwarded; it wakes the caller of that.
        """
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._connection)
            self._fail(ChaoskitError("the process that keeps the copies of this node has ended"))
            return
        for answer in self._splitter.feed(data):
            if isinstance(answer, Finished):
                self._finished.set()
            else:
                self._forward(answer)


def _open(stack: contextlib.ExitStack, pid: int, fds: Sequence[int]) -> list[int]:
    """Open descriptors of another process, and return those of this process.

    They are closed with ``stack``. Raise OSError if the other process has ended.
    """
    opened = []
    for fd in fds:
        opened.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        stack.callback(os.close, opened[-1])
    return opened


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
