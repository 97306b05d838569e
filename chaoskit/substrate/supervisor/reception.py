"""The listening socket for supervisors that dial the runner: each proves the token, and says which place it is of."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Container
from dataclasses import dataclass

from chaoskit.errors import ChaoskitError
from chaoskit.substrate.supervisor.messages import SupervisorHello
from chaoskit.wire import frames
from chaoskit.wire.handshakes import proven

_HELLO_S = 10.0
_decode = frames.decoder(SupervisorHello)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A supervisor that has come.

    ``address``: under which the processes of its node are reached; "" for any. ``machine``: on which that is.
    """

    connection: socket.socket
    address: str
    machine: str = ""


class Reception:
    """A listening socket, and the thread that asks whatever comes for the token.

    A place is expected before its supervisor comes. One that is not expected, such as that of a node that was given
    up, is hung up on, and so ends.

    Args:
        host: address at which it listens.
    """

    def __init__(self, host: str, token: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._come = threading.Condition()
        self._expected = set[str]()
        self._arrivals: dict[str, Arrival] = {}
        self._thread = threading.Thread(
            target=self._receive, args=[token], name="ck-reception", daemon=True
        )
        self._thread.start()

    def expect(self, place: str) -> None:
        """Let a supervisor in that says this place, once."""
        with self._come:
            self._expected.add(place)

    def give_up(self, place: str) -> None:
        """Expect it no more; hang up if it has come and was not taken."""
        with self._come:
            self._expected.discard(place)
            if (arrival := self._arrivals.pop(place, None)) is not None:
                arrival.connection.close()

    def await_any(self, places: Container[str], limit_s: float) -> tuple[str, Arrival] | None:
        """The next supervisor that comes to one of these places; None if none does in time."""
        until_s = time.monotonic() + limit_s
        with self._come:
            while True:
                for place in self._arrivals:
                    if place in places:
                        return place, self._arrivals.pop(place)
                if not self._come.wait(max(0.0, until_s - time.monotonic())):
                    return None

    def _receive(self, token: str) -> None:
        for connection in proven(self._listener, token):
            try:
                connection.settimeout(_HELLO_S)
                hello: SupervisorHello = frames.receive(
                    connection, _decode, most_bytes=frames.UNPROVEN_BYTES_MAX
                )
                connection.settimeout(None)
            except (OSError, ChaoskitError):
                connection.close()
                continue
            with self._come:
                if hello.place not in self._expected:
                    connection.close()
                    continue
                self._expected.discard(hello.place)
                self._arrivals[hello.place] = Arrival(connection, hello.address, hello.machine)
                self._come.notify_all()

    def close(self) -> None:
        """Let nothing in any more, and hang up on what was not taken."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for place in list(self._arrivals):
            self.give_up(place)
