"""Ports and connections for tests that need a faulty network."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator

from chaoskit.wire.handshakes import Unproven
from support.waiting import LIMIT_S

HOST = "127.0.0.1"


@contextlib.contextmanager
def refusing() -> Iterator[socket.socket]:
    """Yield a TCP socket on loopback that is bound and does not listen: every connection to it is
    refused.

    A closed port would be free for any other process of the machine, and for a connection that
    picks it as its own end. This port is held until the block ends. Give the socket to a server to
    let it listen after all.
    """
    with socket.socket() as held:
        held.bind((HOST, 0))
        yield held


def without_networks(*command: str) -> list[str]:
    """Return a command that runs ``command`` where the kernel allows no further network namespace.

    It ends with an error of ``unshare`` or ``sh`` if this user may make no user namespace.
    """
    script = 'echo 0 > /proc/sys/user/max_net_namespaces\nexec "$@"'
    return ["unshare", "--user", "--map-root-user", "sh", "-ec", script, "sh", *command]


def accept(connection: socket.socket, token: str) -> None:
    """Authenticate the client of a connection, as a server does it.

    Raises:
        OSError: if the connection ends.
        Refused: if the client does not know the token.
    """
    until_s = time.monotonic() + LIMIT_S
    client = Unproven(connection, token, until_s)
    while time.monotonic() < until_s:
        select.select([connection], [], [], LIMIT_S)
        with contextlib.suppress(BlockingIOError):
            client.read()
            return
    raise TimeoutError("no proof of the token")
