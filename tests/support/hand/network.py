"""Two stations of a network on this machine, and a network hand at one of them.

-> ``support/hand/client.py``: the client of the hand.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

from chaoskit.substrate.core import namespaces
from chaoskit.substrate.limits import capabilities
from chaoskit.substrate.network.fabric import Fabric
from support.hand.client import HandClient, hand
from support.waiting import wait_until

WHY_NOT = (
    capabilities.rules()
    or ("" if capabilities.privileged() else "not root")
    or ("" if shutil.which("tc") else "tc not found: install iproute2")
)
PORT = 7_000
ANSWER_S = 0.05


class Pair:
    """Two stations: the hand's, ``near``, and its peer's, ``far``, which echoes datagrams."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.near, self.far, self.other = (
            fabric.stations[name].address for name in ("near", "far", "other")
        )
        self.echoes = {name: self.socket(name, socket.SOCK_DGRAM) for name in ("far", "other")}
        for name, echo in self.echoes.items():
            echo.bind((fabric.stations[name].address, PORT))
        self._sender = self.socket("near", socket.SOCK_DGRAM)
        self._sender.settimeout(ANSWER_S)
        self._number = 0

    def socket(self, station: str, kind: socket.SocketKind) -> socket.socket:
        with namespaces.entered(self._fabric.stations[station].namespace):
            return socket.socket(socket.AF_INET, kind)

    @contextlib.contextmanager
    def hand(self, *options: str, prefix: Sequence[str] = ()) -> Iterator[HandClient]:
        """Start a network hand at ``near``."""
        with contextlib.ExitStack() as stack:
            with namespaces.entered(self._fabric.stations["near"].namespace):
                client = stack.enter_context(hand("network", *options, prefix=prefix))
            yield client

    def run(self, *command: str) -> str:
        """Return the output of a command at ``near``."""
        with namespaces.entered(self._fabric.stations["near"].namespace):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def tables(self) -> str:
        """Return the tables of nftables at ``near``, one a line."""
        return self.run("nft", "list", "tables")

    def arrives(self, name: str = "far") -> bool:
        """Return whether a datagram from ``near`` reaches a station."""
        self._number += 1
        echo, text = self.echoes[name], b"%d" % self._number
        echo.settimeout(ANSWER_S)
        with contextlib.suppress(PermissionError):  # the rule of another direction refuses it
            self._sender.sendto(text, (self._fabric.stations[name].address, PORT))
        with contextlib.suppress(TimeoutError):
            while echo.recvfrom(100)[0] != text:
                pass
            return True
        return False

    def answers(self, name: str = "far") -> bool:
        """Return whether a datagram from a station reaches ``near``."""
        self._number += 1
        text = b"%d" % self._number
        self.echoes[name].sendto(text, (self.near, self._sender.getsockname()[1]))
        with contextlib.suppress(TimeoutError):
            while self._sender.recvfrom(100)[0] != text:
                pass
            return True
        return False

    def check_open(self, name: str = "far") -> None:
        """Wait until datagrams pass in both directions."""
        wait_until(lambda: self.arrives(name), f"a datagram at {name}")
        wait_until(lambda: self.answers(name), f"a datagram from {name}")

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a new connection: that of ``near``, and that of ``far``."""
        with self.socket("far", socket.SOCK_STREAM) as listener:
            listener.bind((self.far, 0))
            listener.listen()
            near = self.socket("near", socket.SOCK_STREAM)
            near.connect(listener.getsockname())
            far, _ = listener.accept()
        near.settimeout(5)
        far.settimeout(5)
        return near, far


@contextlib.contextmanager
def open_pair() -> Iterator[Pair]:
    """Make two stations and a third one, between which datagrams pass."""
    with contextlib.closing(Fabric(["near", "far", "other"])) as fabric:
        made = Pair(fabric)
        made.check_open("far")
        made.check_open("other")
        yield made
