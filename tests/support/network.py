"""Ports and connections for tests that need a network that does not work well."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def refusing() -> Iterator[socket.socket]:
    """A TCP socket on loopback that is bound and does not listen: every connection to it is refused.

    A port that was closed would be free for any other process of the machine, and for a connection that picks it as
    its own end. This one is held until the block ends. Give the socket to a server to let it listen after all.
    """
    with socket.socket() as held:
        held.bind((HOST, 0))
        yield held


def without_networks(*command: str) -> list[str]:
    """Return a command that runs ``command`` where the kernel allows no further network namespace.

    It ends with an error of ``unshare`` or ``sh`` where this user may make no user namespace.
    """
    script = 'echo 0 > /proc/sys/user/max_net_namespaces\nexec "$@"'
    return ["unshare", "--user", "--map-root-user", "sh", "-ec", script, "sh", *command]
