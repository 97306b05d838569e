"""A TCP proxy between a client and a server under test that holds or damages data."""

from __future__ import annotations

import contextlib
import socket
import threading

HOST = "127.0.0.1"


class Relay:
    """Proxy that passes on the bytes of every connection to ``target``, in both directions.

    Args:
        hold_after: hold back the answers of the target after this number of bytes of the first
            connection, until :meth:`release`. :attr:`held` is set when that point is reached.
        change_byte: the place in each direction of each connection at which one bit is inverted.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        hold_after: int | None = None,
        change_byte: int | None = None,
    ) -> None:
        self._target, self._hold_after, self._change_byte = target, hold_after, change_byte
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.held, self._released = threading.Event(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def release(self) -> None:
        """Pass on the bytes that were held back."""
        self._released.set()

    def close(self) -> None:
        """Accept no more connections, and stop holding back."""
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:  # the target is gone
                near.close()
                continue
            for source, sink, hold in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, hold), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, hold: bool) -> None:
        passed = 0
        limit = self._hold_after if hold else None
        try:
            while True:
                if limit is not None and passed == limit and not self._released.is_set():
                    self.held.set()
                    self._released.wait()
                most = 2**16 if limit is None or passed >= limit else min(2**16, limit - passed)
                data = bytearray(source.recv(most))
                if not data:
                    break
                if self._change_byte is not None and passed <= self._change_byte < passed + len(
                    data
                ):
                    data[self._change_byte - passed] ^= 1
                sink.sendall(data)
                passed += len(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
