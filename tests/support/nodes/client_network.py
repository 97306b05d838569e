"""A network of its own for a client of the tests' cluster, which a test takes away.

Needs root. -> ``support/nodes/pods.py``: the cluster, whose API server listens on this machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

_NAME = "client"
_OUTSIDE = "client-cable"
_HOST_ADDRESS, _CLIENT_ADDRESS = "198.51.100.1", "198.51.100.2"  # a block for documentation


class ClientNetwork:
    """A network namespace with one cable to this machine.

    Attributes:
        prefix: the command before that of a process that is to be in it.
    """

    prefix = ("ip", "netns", "exec", _NAME)

    def unplug(self) -> None:
        """Take the cable out. No end of a connection passes any more, not even a reset."""
        _ip(f"link set {_OUTSIDE} down")


@contextlib.contextmanager
def client_network() -> Iterator[ClientNetwork]:
    """Create the network, and remove it when the context ends. Its processes must be gone then."""
    _ip(f"netns add {_NAME}")
    with contextlib.ExitStack() as undone:
        undone.callback(_ip, f"netns delete {_NAME}")
        _ip(f"link add {_OUTSIDE} type veth peer name eth0 netns {_NAME}")
        undone.callback(_ip, f"link delete {_OUTSIDE}")  # the namespace may end much later
        _ip(f"address add {_HOST_ADDRESS}/30 dev {_OUTSIDE}")
        _ip(f"link set {_OUTSIDE} up")
        _ip(f"-n {_NAME} address add {_CLIENT_ADDRESS}/30 dev eth0")
        _ip(f"-n {_NAME} link set eth0 up")
        _ip(f"-n {_NAME} link set lo up")
        _ip(f"-n {_NAME} route add default via {_HOST_ADDRESS}")
        yield ClientNetwork()


def no_networks() -> str:
    """Return why such a network cannot be made, or "" if it can."""
    return "" if os.geteuid() == 0 else "network namespaces need root"


def _ip(arguments: str) -> None:
    """Run a command of ``ip``. Raises CalledProcessError if it fails."""
    subprocess.run(["ip", *arguments.split()], check=True)
