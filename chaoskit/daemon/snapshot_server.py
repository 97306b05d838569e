"""What keepers are made of: a thread that takes orders, and copies that others can read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from chaoskit.checkpoint.layout.arena import ArenaView
from chaoskit.checkpoint.layout.seal import Seal
from chaoskit.process.linux import host_id, lower_priority, set_name
from chaoskit.runtime.state.peer import StateServer
from chaoskit.wire.messages import Endpoint, Snapshot


class Orders:
    """Calls from other threads that a keeper's thread carries out.

    Attributes:
        wake: an eventfd that is readable when there are some.
    """

    def __init__(self) -> None:
        self._orders: deque[Callable[[], None]] = deque()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def give(self, act: Callable[[], None]) -> None:
        """Have the thread do ``act``; returns at once."""
        self._orders.append(act)
        os.eventfd_write(self.wake, 1)

    def carry_out(self) -> None:
        """To be called by the thread when :attr:`wake` is readable."""
        os.eventfd_read(self.wake)
        while self._orders:
            self._orders.popleft()()


def start_thread(
    serve: Callable[[], None], fail: Callable[[BaseException], None], niceness: int
) -> None:
    """Run a keeper. ``fail`` is called on its thread with what it cannot live with."""

    def run() -> None:
        set_name("ck-keeper")
        lower_priority(niceness)
        try:
            serve()
        except Exception as error:  # noqa: BLE001 - nobody would see it on a thread
            fail(error)

    threading.Thread(target=run, name="keeper", daemon=True).start()


class Offers:
    """Serves copies to whoever restores, each for as long as it is offered."""

    def __init__(self, node: str, host: str, token: str) -> None:
        self._node, self._host, self._token = node, host, token
        self._servers: dict[int, tuple[ArenaView, StateServer]] = {}  # by descriptor

    def withdraw(self, views: list[ArenaView]) -> None:
        """Stop to serve all but ``views``."""
        for fd, (view, server) in list(self._servers.items()):
            if not any(view is one for one in views):
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
    ) -> Snapshot:
        """Let others read ``view``. Raises OSError if there is no descriptor or port for a server."""
        if view.fd not in self._servers:
            self._servers[view.fd] = view, StateServer(view, self._token, self._host)
        return Snapshot(
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
