"""A coordinator in its own process, for tests that connect to it over sockets."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from chaoskit.wire import frames, messages
from support.waiting import LIMIT_S

TOKEN = "token"
_SERVE = """
import asyncio, socket, sys
from chaoskit.config import RunConfig
from chaoskit.coordinator.server import Coordinator, CoordinatorSpec
from chaoskit.job import JobSpec

coordinator = Coordinator(CoordinatorSpec(RunConfig(job=JobSpec("job.py"), nodes=2), "token", sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
print(listener.getsockname()[1], flush=True)
asyncio.run(coordinator.serve([listener]))
"""


class CoordinatorProcess:
    """A coordinator of a run of two nodes, before any node has connected.

    Attributes:
        pid: the pid of its process.
        address: the address of its only listener.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.pid = process.pid
        self.address = ("127.0.0.1", int(process.stdout.readline()))

    def connect(self, hello: messages.Message) -> socket.socket:
        """Connect and authenticate a client with the token; each wait for an answer has a limit."""
        connection = frames.connect(self.address, TOKEN, LIMIT_S)
        connection.settimeout(LIMIT_S)
        frames.send(connection, hello)
        return connection


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[CoordinatorProcess]:
    """Run a coordinator while the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(directory)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield CoordinatorProcess(process)
        finally:
            process.kill()
