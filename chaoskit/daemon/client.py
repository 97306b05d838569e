"""The agent's line to the process that keeps its node's copies: orders that wait for nothing, and answers."""

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
from chaoskit.process.heartbeat_page import Board
from chaoskit.wire import frames
from chaoskit.wire.messages import Endpoint, Holding, MeasureLinks, Message, Plan, Recall, Store

_RECEIVE_BYTES = 65536
_SLACK_S = 0.25  # for the way there and back


@dataclass(slots=True)
class _Unsent:
    """What is left of an order, and the descriptors that go with its first byte: ours, to be closed."""

    data: memoryview
    descriptors: Sequence[int]


class KeeperLine:
    """A keeper in another process. Whatever is ordered returns at once, and comes there in this order.

    Args:
        connection: to the process.
        port: where it takes copies of pieces; 0 where it takes none.
    """

    def __init__(self, connection: socket.socket, port: int) -> None:
        self._connection, self._port = connection, port
        self._splitter = frames.Splitter(decode_answer)
        self._unsent: deque[_Unsent] = deque()
        self._finished = asyncio.Event()
        self._step = 0  # that was last told of

    def open(self, tell: Callable[[Message], None], fail: Callable[[BaseException], None]) -> None:
        """Begin, in the running event loop.

        Args:
            tell: takes an answer to the coordinator.
            fail: called when the process has ended: nothing is kept any more.
        """
        self._tell, self._fail = tell, fail
        self._connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection, self._hear)

    def close(self) -> None:
        """Have the process end."""
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._connection.close()

    # -- orders: see NodeKeeper -----------------------------------------------------------------------------------

    def adopt(self, worker: str, endpoint: Endpoint, board: Board) -> Endpoint:
        """A worker is ready. Returns where others bring copies of its state, and read it."""
        told, descriptors = endpoint, [board.fd, board.bell]
        with contextlib.ExitStack() as opened:
            try:
                if endpoint.arena_fd >= 0:
                    descriptors += _open(opened, endpoint.pid, [endpoint.arena_fd])
            except OSError:  # it has ended already
                told = msgspec.structs.replace(endpoint, arena_fd=-1)
            self._give(Adopt(worker, told), descriptors)
        return msgspec.structs.replace(endpoint, port=self._port) if self._port else endpoint

    def hold(self, holding: Holding) -> None:
        """A worker copies its piece into slots."""
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):  # it has ended already
            self._give(holding, _open(opened, holding.pid, holding.fds))

    def follow(self, plan: Plan) -> None:
        """A membership."""
        self._give(plan)

    def ended(self, worker: str) -> None:
        """No code of the worker runs any more."""
        self._give(Ended(worker))

    def recall(self, number: int) -> None:
        """Answered by ``Sealed``, which goes to the coordinator."""
        self._give(Recall(number))

    def went_on(self, step: int) -> None:
        """A live worker of this node has committed ``step`` steps."""
        if step != self._step:
            self._step = step
            self._give(WentOn(step))

    def store(self, order: Store) -> None:
        """Have the state after one more step stored, or the newest one."""
        self._give(order)

    def measure(self, order: MeasureLinks) -> None:
        """Answered by ``LinksMeasured``, which goes to the coordinator."""
        self._give(order)

    async def finish(self, timeout_s: float, *, last: bool, workers: tuple[str, ...]) -> None:
        """The job is over: what is being written, and then what is being uploaded, has so long to get there.

        Args:
            last: it has as long as it takes instead, and the state with which the job ended is stored, too.
            workers: those of this node that were there at the end.
        """
        self._give(Finish(timeout_s, last, workers))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._finished.wait(), None if last else 2 * timeout_s + _SLACK_S
            )

    # -- the line -------------------------------------------------------------------------------------------------

    def _give(self, order: Message, descriptors: Sequence[int] = ()) -> None:
        ours = [
            os.dup(fd) for fd in descriptors
        ]  # those of the caller may be closed before there is room
        self._unsent.append(_Unsent(memoryview(frames.encode(order)), ours))
        if len(self._unsent) == 1:
            self._send()

    def _send(self) -> None:
        """As much as there is room for; the rest when there is."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = socket.send_fds(self._connection, [first.data], list(first.descriptors))
            except BlockingIOError:
                self._loop.add_writer(self._connection, self._send)
                return
            except ConnectionError:  # it has ended, as will be heard
                sent = len(first.data)
            _close(first.descriptors)
            first.data, first.descriptors = first.data[sent:], ()
            if not first.data:
                self._unsent.popleft()
        self._loop.remove_writer(self._connection)

    def _hear(self) -> None:
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
                self._tell(answer)


def _open(stack: contextlib.ExitStack, pid: int, fds: Sequence[int]) -> list[int]:
    """Descriptors of ours, until ``stack`` closes, of files that another process has open. Raises OSError."""
    opened = []
    for fd in fds:
        opened.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        stack.callback(os.close, opened[-1])
    return opened


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
