"""The runner's listening socket for supervisors that dial it.

Each supervisor proves that it has the token, and names its place.

-> ``kubernetes/pods/pods.py``: pods whose supervisors are expected here.
"""

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
    """A supervisor that has connected.

    Attributes:
        address: address of the processes of its node; "" if the supervisor does not know it.
        machine: name of the node's machine; "" if unknown.
    """

    connection: socket.socket
    address: str
    machine: str = ""


class Reception:
    """A listening socket, and the thread that accepts supervisors which have the token.

    A place must be expected before its supervisor connects. Others, such as one of a node that was
    given up, are disconnected and end.

    Args:
        host: address to listen on.
        token: token that supervisors must have.

    Attributes:
        address: host and port of the socket.
    """

    def __init__(self, host: str, token: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._changed = threading.Condition()  # guards the next two
        self._expected = set[str]()
        self._arrivals: dict[str, Arrival] = {}
        self._thread = threading.Thread(
            target=self._receive, args=[token], name="ck-reception", daemon=True
        )
        self._thread.start()

    def expect(self, place: str) -> None:
        """Accept the next supervisor that names this place."""
        with self._changed:
            self._expected.add(place)

    def give_up(self, place: str) -> None:
        """Stop expecting a supervisor, and disconnect one that has connected but was not taken."""
        with self._changed:
            self._expected.discard(place)
            if (arrival := self._arrivals.pop(place, None)) is not None:
                arrival.connection.close()

    def await_any(self, places: Container[str], limit_s: float) -> tuple[str, Arrival] | None:
        """Return a place of these and the supervisor that has connected for it.

        The supervisor is handed out once: the caller closes its connection. Return None if none has
        connected within ``limit_s``.
        """
        until_s = time.monotonic() + limit_s
        with self._changed:
            while True:
                for place in self._arrivals:
                    if place in places:
                        return place, self._arrivals.pop(place)
                if not self._changed.wait(max(0.0, until_s - time.monotonic())):
                    return None

    def _receive(self, token: str) -> None:
        """Accept supervisors until the socket is closed. This runs in the thread."""
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
            with self._changed:
                if hello.place not in self._expected:
                    connection.close()
                    continue
                self._expected.discard(hello.place)
                self._arrivals[hello.place] = Arrival(connection, hello.address, hello.machine)
                self._changed.notify_all()

    def close(self) -> None:
        """Stop listening, and disconnect the supervisors that were not taken."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for place in list(self._arrivals):
            self.give_up(place)
