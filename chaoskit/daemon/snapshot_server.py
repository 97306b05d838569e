"""Parts of a keeper: a queue of orders for its thread, and servers of copies.

-> ``runtime/state/peer.py``: the server of one copy, and the rank that reads from it.
-> ``checkpoint/peer/server.py``: receives copies from other nodes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from chaoskit.checkpoint.layout.arena import ArenaView
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.process.linux import host_id, lower_priority, set_name
from chaoskit.runtime.state.peer import StateServer
from chaoskit.wire.messages import Endpoint, OfferedSnapshot


class Orders:
    """Calls from other threads that a keeper's thread carries out.

    Attributes:
        wake: an eventfd that is readable while there are orders.
    """

    def __init__(self) -> None:
        self._orders: deque[Callable[[], None]] = deque()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def give(self, act: Callable[[], None]) -> None:
        """Queue ``act`` for the thread. Returns at once."""
        self._orders.append(act)
        os.eventfd_write(self.wake, 1)

    def carry_out(self) -> None:
        """Carry out all orders. The thread calls this when :attr:`wake` is readable.

        An error of an order is raised, and the later orders stay queued.
        """
        os.eventfd_read(self.wake)
        while self._orders:
            self._orders.popleft()()


def start_thread(
    serve: Callable[[], None], fail: Callable[[BaseException], None], niceness: int
) -> None:
    """Start the thread of a keeper. ``fail`` is called on it with an error that ended it."""

    def run() -> None:
        set_name("ck-keeper")
        lower_priority(niceness)
        try:
            serve()
        except Exception as error:  # noqa: BLE001 - would be lost on a thread
            fail(error)

    threading.Thread(target=run, name="keeper", daemon=True).start()


class Offers:
    """Servers of copies for nodes that restore. A copy is served until it is withdrawn.

    Args:
        node: name of this node.
        host: address under which other nodes reach it.
        token: secret that authenticates connections.
    """

    def __init__(self, node: str, host: str, token: str) -> None:
        self._node, self._host, self._token = node, host, token
        self._servers: dict[int, tuple[ArenaView, StateServer]] = {}  # by descriptor

    def withdraw(self, views: list[ArenaView]) -> None:
        """Stop serving all copies except ``views``. Transfers under way are completed."""
        for fd, (view, server) in list(self._servers.items()):
            if not any(view is kept for kept in views):
                server.close()
                del self._servers[fd]

    def offer(
        self,
        worker: str,
        seal: Seal,
        view: ArenaView,
        *,
        tier: str = "memory",
        piece: int = 0,
        pieces: int = 1,
    ) -> OfferedSnapshot:
        """Serve ``view``, unless it is served already, and return its description.

        The description is for the coordinator.

        Args:
            worker: worker whose state or piece it is.
            seal: seal of the copy.
            view: the memory of the copy, which stays mapped until it is withdrawn.
            tier: ``memory`` for a worker of this node, or ``peer`` for one of another node.
            piece, pieces: number of the piece, from 0 on, and number of all pieces.

        Raises:
            OSError: if there is no descriptor or port for a server.
        """
        if view.fd not in self._servers:
            self._servers[view.fd] = view, StateServer(view, self._token, self._host)
        return OfferedSnapshot(
            node=self._node,
            worker=worker,
            step=seal.step,
            generation=seal.generation,
            size_bytes=seal.size_bytes,
            checksum=seal.checksum,
            endpoint=Endpoint(
                host_id(), self._host, self._servers[view.fd][1].port, os.getpid(), view.fd
            ),
            tier=tier,
            piece=piece,
            pieces=pieces,
            inode=os.fstat(view.fd).st_ino,
        )
