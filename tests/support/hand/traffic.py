"""Nodes of a job on this machine: each has a network namespace, and a hand that stands in it.

-> ``support/hand/network.py``: two stations, and the plain client of one hand.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

from chaoskit.attach.hands.hand import Hand
from chaoskit.errors import NodeUnreachable
from chaoskit.substrate.core import namespaces
from chaoskit.substrate.network.fabric import Fabric
from support.hand.client import directory, public_python
from support.hand.network import PORT
from support.hand.pipe_stream import PipeStream
from support.waiting import LIMIT_S, wait_until

_ARRIVES_S = 0.1


class HandProcess:
    """A network hand of a node, and pipes to it that this process keeps open."""

    def __init__(self, *options: str) -> None:
        read_fd, self.input_fd = os.pipe()
        self.output_fd, write_fd = os.pipe()
        command = [public_python(), "-S", "-s", "-E", "-m", "hand", "--network", *options]
        self.process = subprocess.Popen(command, stdin=read_fd, stdout=write_fd, cwd=directory())
        os.close(read_fd)
        os.close(write_fd)

    def client(self, name: str) -> Hand:
        """Return a client of the hand. It has descriptors of its own."""
        return Hand(name, PipeStream(os.dup(self.input_fd), self.output_fd))

    def kill(self) -> None:
        """Kill the hand."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Close the pipes."""
        for descriptor in (self.input_fd, self.output_fd):
            os.close(descriptor)


class JobNodes:
    """Nodes between which datagrams pass.

    Attributes:
        silent_s: a hand that is started from now on ends after so long without a line.
        gone: nodes whose pod counts as gone.
    """

    def __init__(self, names: list[str]) -> None:
        self.silent_s = 600.0
        self.gone = set[str]()
        self._fabric = Fabric(names)
        self._processes: dict[str, HandProcess] = {}
        self._hands: dict[str, Hand] = {}
        self._sockets = {name: self.socket(name, socket.SOCK_DGRAM) for name in names}
        for name, node_socket in self._sockets.items():
            node_socket.bind((self.address(name), PORT))
            node_socket.settimeout(_ARRIVES_S)
        self._number = 0

    def address(self, name: str) -> str:
        """Return the address of a node."""
        if name in self.gone:
            raise NodeUnreachable(f"{name} has no pod")
        return self._fabric.stations[name].address

    def process(self, name: str) -> HandProcess:
        """Return the hand of a node as a process. The first call starts it."""
        if name not in self._processes:
            with namespaces.entered(self._fabric.stations[name].namespace):
                self._processes[name] = HandProcess("--silent-s", str(self.silent_s))
        return self._processes[name]

    def hand(self, name: str) -> Hand:
        """Return the client of a node's hand. The first call starts the hand, and waits for it."""
        if name not in self._hands:
            self._hands[name] = self.process(name).client(f"the hand of {name}")
            self._hands[name].ask("hello", limit_s=LIMIT_S)
        return self._hands[name]

    def started(self) -> set[str]:
        """Return the nodes whose hands have been started."""
        return set(self._processes)

    def signal(self, name: str, signum: signal.Signals) -> None:
        """Send a signal to the hand of a node."""
        self.process(name).process.send_signal(signum)

    def socket(
        self, name: str, kind: socket.SocketKind, family: int = socket.AF_INET
    ) -> socket.socket:
        """Return a socket in the network of a node."""
        with namespaces.entered(self._fabric.stations[name].namespace):
            return socket.socket(family, kind)

    def run(self, name: str, *command: str) -> str:
        """Return the output of a command in the network of a node."""
        with namespaces.entered(self._fabric.stations[name].namespace):
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def passes(self, source: str, target: str) -> bool:
        """Return whether a datagram from a node arrives at another."""
        self._number += 1
        text, receiver = b"%d" % self._number, self._sockets[target]
        self._sockets[source].sendto(text, (self._fabric.stations[target].address, PORT))
        with contextlib.suppress(TimeoutError):
            while receiver.recvfrom(100)[0] != text:
                pass
            return True
        return False

    def blocked(self) -> set[tuple[str, str]]:
        """Return the ways on which no datagram arrives."""
        return {
            (source, target)
            for source in self._sockets
            for target in self._sockets
            if source != target and not self.passes(source, target)
        }

    def connection(self, source: str, target: str) -> tuple[socket.socket, socket.socket]:
        """Return the two ends of a new connection, that of the source first."""
        with self.socket(target, socket.SOCK_STREAM) as listener:
            listener.bind((self._fabric.stations[target].address, 0))
            listener.listen()
            near = self.socket(source, socket.SOCK_STREAM)
            near.settimeout(5)
            near.connect(listener.getsockname())
            far, _ = listener.accept()
        far.settimeout(5)
        return near, far

    def close(self) -> None:
        """End the hands, and the network."""
        for process in self._processes.values():
            process.kill()
        for hand in self._hands.values():
            hand.close()
        for process in self._processes.values():
            process.close()
        for node_socket in self._sockets.values():
            node_socket.close()
        self._fabric.close()


@contextlib.contextmanager
def job_nodes(*names: str) -> Iterator[JobNodes]:
    """Make nodes between which datagrams pass, and end their hands when the context ends."""
    with contextlib.closing(JobNodes(list(names))) as nodes:
        wait_until(lambda: not nodes.blocked(), "datagrams between all nodes")
        yield nodes
